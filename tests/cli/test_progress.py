"""What a long command says while it works: in a log file, on a terminal, and where it fails."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from qat_lora.cli import progress
from qat_lora.config import presets


@pytest.fixture
def screen(monkeypatch, request):
    """A console that is a terminal or a file, and a clock that is moved by hand: (text so far, move the clock)."""
    console = Console(file=io.StringIO(), force_terminal=request.param == "terminal", width=100)
    now = [100.0]
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return console.file.getvalue, wait


@pytest.mark.parametrize("screen", ["file"], indirect=True)
def test_a_log_file_hears_of_long_work_every_half_minute(screen) -> None:
    text, wait = screen
    with progress.bar("cache", total=1000, unit_per_second="tokens/s", units_each=100) as update:
        update(0)
        for done in range(10, 100, 10):  # nine times ten seconds
            wait(10)
            update(done)
        lines = text().splitlines()
        assert len(lines) == 3
        assert lines[0] == "cache 30/1,000, 100 tokens/s, 0:30, about 16 min left"
        wait(3600)
    assert text().splitlines()[-1].startswith("cache 1,000/1,000")
    assert len(text().splitlines()) == 4


@pytest.mark.parametrize("screen", ["file", "terminal"], indirect=True)
def test_work_that_was_done_already_ends_as_done(screen) -> None:
    text, _ = screen
    with progress.bar("qat", total=30):
        pass
    assert "30/30" in text() and " 0/30" not in text().splitlines()[-1]


@pytest.mark.parametrize("screen", ["file"], indirect=True)
def test_slow_steps_have_a_rate_too(screen) -> None:
    text, wait = screen
    with progress.bar("qat", total=3, unit_per_second="steps/s") as update:
        for done in range(3):
            update(done)
            wait(4)
    assert "0.25 steps/s" in text()


@pytest.mark.parametrize("screen", ["file", "terminal"], indirect=True)
def test_work_that_fails_leaves_no_bar(screen) -> None:
    text, _ = screen
    with pytest.raises(ValueError, match="broken"), progress.bar("qat", total=5) as update:
        update(0)
        raise ValueError("broken")
    assert "\x1b[2K" in text().rsplit("qat", 1)[1] if text() else True, "drawn on a terminal, and erased"
    assert bool(text()) == progress.console.is_terminal


def test_rounding_says_which_layer_it_is_at(monkeypatch, caplog) -> None:
    from qat_lora.quant import conversion

    now = iter(range(0, 1000, 4))
    monkeypatch.setattr(conversion.time, "monotonic", lambda: float(next(now)))
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 8, bias=False) for _ in range(8)))
    with caplog.at_level("INFO"):
        conversion.quantize_model(model, presets.scheme("q4_g32"), {str(i): "mlp" for i in range(8)})
    assert [r.message for r in caplog.records] == ["rounding layer 3/8", "rounding layer 6/8"]
