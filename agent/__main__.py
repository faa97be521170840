"""Where the command ``agent`` begins: ctrl-C is heard before the first import that takes time."""

from __future__ import annotations

import os
import signal


def main() -> None:
    def leave(number: int, frame: object) -> None:
        os._exit(128 + number)  # nothing has begun, so there is nothing to say or to end

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, leave)
    from agent.cli import main as run

    run()


if __name__ == "__main__":
    main()
