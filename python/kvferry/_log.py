"""The native module's log lines, as records of Python's logging.

A thread of its own fetches them: threads that move blocks never wait for the interpreter.
"""

from __future__ import annotations

import atexit
import logging
import threading

from kvferry import _native

_TRACE = 5
_lock = threading.Lock()
_thread: threading.Thread | None = None


def start(parent: str = "kvferry") -> None:
    """Sends log lines to loggers below `parent`, from now on; its level now is the level of what is sent.

    Lines of the Rust module `kvferry_engine::ucx` go to the logger `<parent>.engine.ucx`, UCX's own to
    `<parent>.ucx`. The first call of a process decides on the parent; later ones set the level anew.
    """
    global _thread
    level = max(_TRACE, logging.getLogger(parent).getEffectiveLevel())
    with _lock:
        # A child that was forked has the variable and not the thread.
        if not _native.start_log(level) or (_thread is not None and _thread.is_alive()):
            return
        _thread = threading.Thread(target=_run, args=(parent,), name="kvferry-log", daemon=True)
        _thread.start()
        # Before the interpreter goes: a thread inside of native code must not be cut off there.
        atexit.register(_stop)


def _stop() -> None:
    thread = _thread
    if thread is not None and thread.is_alive():
        _native.stop_log()
        thread.join(timeout=2)


def _run(parent: str) -> None:
    loggers: dict[str, logging.Logger] = {}
    while True:
        lines = _native.next_log_lines(3600.0)
        if lines is None:
            return
        for level, target, text, number in lines:
            logger = loggers.get(target)
            if logger is None:
                name = target.replace("::", ".").removeprefix("kvferry_")
                logger = loggers[target] = logging.getLogger(f"{parent}.{name}")
            if logger.isEnabledFor(level):
                # Where the line is from is said in place of this file.
                record = logger.makeRecord(logger.name, level, target, number, f"kvferry: {text}", (), None)
                logger.handle(record)
        if lost := _native.lost_log_lines():
            logging.getLogger(parent).warning("%d log lines were lost: too many at once", lost)
