from __future__ import annotations

from headrace.gateway.quarantine import fingerprint
from headrace.protocol.frames import Grammar, GrammarKind, Sampling, Submit


def test_an_identity_is_what_is_run_and_not_who_asks() -> None:
    plain = Submit("a", [1, 2], 8)
    grammar = Grammar(GrammarKind.REGEX, "x")

    assert fingerprint((plain,)) == fingerprint((Submit("b", [1, 2], 8, Sampling(seed=5)),))
    different = {
        fingerprint((submit,))
        for submit in (
            plain,
            Submit("a", [1, 3], 8),
            Submit("a", [1, 2], 9),
            Submit("a", [1, 2], 8, grammar=grammar),
            Submit("a", [1, 2], 8, grammar=Grammar(GrammarKind.REGEX, "y")),
        )
    }
    assert len(different) == 5
