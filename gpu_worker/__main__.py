"""`python -m gpu_worker`: serve a model. `plan` says what fits, `check` what works on this machine."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

from broker import curve
from broker.addresses import address, make_run_dir
from broker.lifeline import end_with_supervisor
from broker.logs import Log
from broker.options import load

from . import devices
from .settings import WorkerSettings
from .source import LoadError, check_model

EXIT_DRAINED: Final = 0
EXIT_USAGE: Final = 2  # a wrong setting; also `broker.options.EXIT_USAGE`
EXIT_NO_MODEL: Final = 3  # it can't be loaded, or no token comes out of it
EXIT_NO_DEVICE: Final = 4  # it isn't there, or another worker has it
EXIT_REFUSED: Final = 5  # the broker doesn't want us: name or device are taken, or another version
EXIT_ENGINE_DIED: Final = 6
EXIT_STALLED: Final = 7  # a step never returned
PROG: Final = "python -m gpu_worker"


def main(argv: list[str]) -> int:
    """Run the named command; returns its exit code."""
    if argv[:1] == ["plan"]:
        from .plan import main as plan

        return plan(argv[1:])
    if argv[:1] == ["check"]:
        from .check import main as check

        return check(argv[1:])
    return run(argv[1:] if argv[:1] == ["run"] else argv)


def run(argv: list[str]) -> int:
    """Serve until told to stop; returns the exit code."""
    settings = load(WorkerSettings, PROG, argv, os.environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_while_loading)
    end_with_supervisor()
    try:
        where = address("workers", settings.workers, settings.run_dir)
        curve.check(where, settings.curve_keys, "workers")
        if settings.model:
            check_model(settings.model)
        wish = devices.parse(settings.device)
        devices.prepare_environment(wish, os.environ)
        directory = make_run_dir(settings.run_dir)
        log = Log(f"worker/{settings.name or settings.device}", level=settings.log_level)
        claim = devices.claim(wish, directory, share=settings.share_device, log=log)
    except LoadError as problem:
        return _say(problem, EXIT_NO_MODEL)
    except (devices.DeviceError, OSError) as problem:
        return _say(problem, EXIT_NO_DEVICE)
    except ValueError as problem:  # an address that can't be, or its keys
        return _say(problem, EXIT_USAGE)
    name = settings.name or claim.short_name
    return _serve(settings, claim, name, Log(f"worker/{name}", level=settings.log_level))


def _serve(settings: WorkerSettings, claim: devices.Claim, name: str, log: Log) -> int:
    # Only now, with the environment set: this brings torch.
    from .serve import WarmUpFailed, serve
    from .session import End

    try:
        end, stuck = serve(settings, claim, name, log)
    except (LoadError, WarmUpFailed, MemoryError) as problem:
        return _say(problem, EXIT_NO_MODEL)
    except ValueError as problem:
        return _say(problem, EXIT_USAGE)
    codes = {
        End.DRAINED: EXIT_DRAINED,
        End.REFUSED: EXIT_REFUSED,
        End.ENGINE_DIED: EXIT_ENGINE_DIED,
        End.STALLED: EXIT_STALLED,
    }
    code = codes[end]
    if stuck or end is End.ENGINE_DIED:
        # A device in an unknown state may make the interpreter's end hang, or abort with another code.
        sys.stderr.flush()
        os._exit(code)
    return code


def _say(problem: BaseException, code: int) -> int:
    print(f"{PROG}: {problem}", file=sys.stderr)
    return code


def _leave_while_loading(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing is in hand yet: go at once, in whatever the loader is."""
    os._exit(EXIT_DRAINED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
