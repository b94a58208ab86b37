from headrace.fleet.restart import RestartConfig, decide


def test_pauses_double_until_the_fifth_death_makes_a_crash_loop() -> None:
    deaths: tuple[float, ...] = ()
    seen = []

    for now_s in range(0, 60, 10):
        deaths, decision = decide(deaths, RestartConfig(), now_s)
        seen.append((decision.pause_s, decision.is_crash_loop))

    assert seen == [(1, False), (2, False), (4, False), (8, False), (60, True), (60, True)]


def test_deaths_are_forgotten_after_the_window() -> None:
    deaths, _ = decide((0.0, 1.0, 2.0, 3.0), RestartConfig(window_s=600), 602.5)

    assert deaths == (3.0, 602.5)


def test_pause_never_exceeds_the_longest() -> None:
    config = RestartConfig(num_loop_deaths=100)

    _, decision = decide(tuple(float(at_s) for at_s in range(20)), config, 20.0)

    assert decision.pause_s == 60
    assert not decision.is_crash_loop
