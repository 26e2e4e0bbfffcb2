"""python -m moonpool.integrations.mooncake_api PROGRAM ARGS...

Runs PROGRAM (a script, `-m MODULE`, `-c CODE`, or an executable such as `vllm`) unmodified, with `import mooncake.store` and the
commands `mooncake_master`, `mooncake_client`, `mooncake_http_metadata_server` answered by Moonpool, there and in all processes that
it starts. Takes this process's place: signals and the exit status are the program's.
"""

from __future__ import annotations

import os
import sys

from moonpool.integrations.mooncake_api import launch


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 0 if arguments else 2
    command = launch.command(arguments)
    try:
        os.execvpe(command[0], command, launch.environment(os.environ))  # noqa: S606 - the user's own program
    except OSError as e:
        print(f"cannot run {command[0]}: {e.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
