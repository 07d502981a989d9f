"""The worker process that a supervisor starts: `python -m keepstep.tasks PID OPTION…`."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from celery import platforms
from celery.__main__ import main as celery_main

from keepstep.tasks import logs
from keepstep.tasks.supervise import EXIT_REFUSED


def main(arguments: list[str]) -> NoReturn:
    """Run a worker under the supervisor of that pid, with options of Celery's `worker` command."""
    logs.configure(logging.INFO)  # until Celery says which level; it has warnings before that
    supervisor, *options = arguments
    # A supervisor that is killed takes its worker along, as the pool's children go with the worker.
    platforms.set_pdeathsig("SIGKILL")
    if os.getppid() != int(supervisor):  # it was killed before that
        raise SystemExit(EXIT_REFUSED)
    # As from the command line, because that alone hands the worker's exit code on.
    sys.argv = ["celery", "--app", "keepstep.tasks", "--quiet", "worker", *options]
    celery_main()
    raise SystemExit


if __name__ == "__main__":
    main(sys.argv[1:])
