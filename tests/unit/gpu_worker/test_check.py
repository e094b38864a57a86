"""One command says what works here, and fails only for what serving needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker import check


@pytest.mark.filterwarnings("ignore")
def test_this_machine_can_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOADONCE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("LOADONCE_CACHE_DIR", str(tmp_path / "cache"))
    assert check.main([]) == 0
    said = capsys.readouterr().out
    for name in ("torch", "bitsandbytes nf4", "sockets", "run directory", "demo model"):
        assert f"ok   {name}" in said
    assert "no   broker" in said
    assert said.endswith("this machine can serve\n")


def test_what_serving_needs_decides_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise OSError("no such thing\nand more")

    monkeypatch.setattr(
        check, "findings", lambda: [check.probe("sockets", broken), check.probe("x", broken, needed=False)]
    )
    assert check.main([]) == check.EXIT_CANNOT_SERVE
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "FAIL sockets            no such thing",
        "no   x                  no such thing",
        "can't serve: sockets",
    ]


def test_an_argument_is_refused() -> None:
    assert check.main(["--verbose"]) == 2
