"""Every stored format keeps its limit on the demo model: the served form against the exact path on the same file."""

from pathlib import Path

import pytest

from headrace.testing.derive import write_bf16_folder
from headrace.testing.formats import FORMATS, Format, measure_format, write_format

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def gguf(demo_model: Path) -> Path:
    (path,) = demo_model.glob("*.gguf") if demo_model.is_dir() else [demo_model]
    return path


@pytest.fixture(scope="module")
def bf16(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16")
    write_bf16_folder(gguf, folder)
    return folder


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_format_keeps_its_limit(form: Format, gguf: Path, bf16: Path, tmp_path: Path) -> None:
    path = write_format(gguf, bf16, tmp_path, form.stored)

    report = measure_format(gguf, path, positions=512)

    assert report.kl_mean <= form.max_kl
    assert report.top1_ratio >= 0.95
