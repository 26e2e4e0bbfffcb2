"""The tests of kvcache-ai/Mooncake, unmodified, against the drop-in: make conformance PEER_TESTS=folder

`folder` is a checkout of that repository (or one folder with the files of its `mooncake-wheel/tests` and `scripts`); nothing of it
is copied. The tests have fixed ports, so all runs in a network namespace of its own where the system allows that. A test counts as
passed if all its parameters and subtests pass; one that did not run counts as failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import figures
from moonpool.integrations.mooncake_api import launch

LEASE_MS = 500
_SUITE_S = 400
_START_S = 20


class Suite(NamedTuple):
    """One file, or a part of it. `tests` is how many functions it has that can pass on this machine (TCP, no GPU)."""

    name: str
    tier: int
    file: str
    tests: int
    needs: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    """Classes or functions (`Class::test`); empty = all."""
    leave_out: tuple[str, ...] = ()
    """Functions that cannot pass here, or not on the peer either: see `docs/mooncake-api.md`."""


STORE = ("master",)
SUITES = (
    Suite("import structure", 1, "test_import_structure.py", 3),
    Suite("HTTP metadata server", 1, "test_http_metadata_server.py", 5),
    Suite("config", 1, "test_mooncake_config.py", 35),
    Suite("object store", 1, "test_distributed_object_store.py", 16, STORE),
    Suite("replication", 1, "test_replicated_distributed_object_store.py", 5, STORE),
    Suite(
        "replica clear, one store",
        1,
        "test_batch_replica_clear.py",
        7,
        STORE,
        ("TestBatchReplicaClearSingleStore",),
        ("test_clear_with_active_lease", "test_clear_mixed_expired_and_active"),
    ),
    Suite(
        "replica clear, two stores",
        1,
        "test_batch_replica_clear.py",
        3,
        STORE,
        ("TestBatchReplicaClearReplication",),
    ),
    Suite("transfer engine", 1, "transfer_engine_initiator_test.py", 6, ("metadata", "target")),
    Suite("buffer pool", 1, "test_buffer_pool_native.py", 14, STORE),
    Suite("upsert", 2, "test_upsert_api.py", 41, STORE),
    Suite("async store", 2, "test_async_store.py", 14, STORE),
    Suite("copy and move", 2, "test_copy_move_api.py", 10, STORE),
    Suite(
        "tensors",
        2,
        "test_put_get_tensor.py",
        6,
        STORE,
        ("TestDistributedObjectStore",),
        ("test_cuda_local_copy_paths",),
    ),
    Suite("safetensors", 2, "test_safetensor_functions.py", 6, STORE),
    Suite(
        "dummy client",
        2,
        "test_dummy_client.py",
        8,
        ("master", "client"),
        leave_out=(
            "test_dummy_cuda_ipc_put_tensor_waits_for_current_stream",
            "test_dummy_cuda_ipc_batch_put_tensor_waits_for_current_stream",
        ),
    ),
    Suite("two dummy clients", 2, "test_multi_dummy_clients.py", 1, ("master", "client", "pair")),
    Suite("command line", 2, "test_cli.py", 2, ("script",)),
    Suite(
        "tensor parallelism",
        2,
        "test_tensor_api.py",
        49,
        STORE,
        ("TestMooncakeFunctional", "TestMooncakeDataTypes"),
    ),
)

SERVERS = {
    "master": (
        50051,
        [
            "mooncake_master",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--default_kv_lease_ttl={LEASE_MS}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
        ],
    ),
    "metadata": (8080, ["mooncake_http_metadata_server", "--port", "8080", "--host", "127.0.0.1"]),
    "client": (50052, ["mooncake_client", "--host=127.0.0.1", "--global_segment_size=4GB"]),
}
SETTINGS = {
    "MC_METADATA_SERVER": "http://127.0.0.1:8080/metadata",
    "DEFAULT_KV_LEASE_TTL": str(LEASE_MS),
    "MASTER_SERVER": "127.0.0.1:50051",
    "PROTOCOL": "tcp",
    "MC_FORCE_TCP": "true",
    "CIRCLE": "200",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}
FROM_ENVIRONMENT = {
    "MOONCAKE_MASTER": "127.0.0.1:50051",
    "MOONCAKE_TE_META_DATA_SERVER": "http://127.0.0.1:8080/metadata",
    "MOONCAKE_PROTOCOL": "tcp",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(3 << 30),
    "MOONCAKE_LOCAL_BUFFER_SIZE": str(1 << 30),
    "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
}
"""For the files of `scripts`, which read their configuration from the environment; a test of tier 1 wants it empty."""


class Outcome(NamedTuple):
    suite: Suite
    passed: int
    failed: tuple[str, ...]
    seconds: float


class Runner:
    """Runs suites against servers that it starts; logs lie in `work`."""

    def __init__(self, tests: Path, work: Path) -> None:
        self._folders = (tests, tests / "mooncake-wheel/tests", tests / "scripts", tests.parent.parent / "scripts")
        self._work = work
        self._more: Mapping[str, str] = {}
        runtime = work / "run"
        runtime.mkdir(mode=0o700)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MOONCAKE_", "MC_"))}
        self._environment = launch.environment({**inherited, **SETTINGS, "XDG_RUNTIME_DIR": str(runtime)})

    def find(self, file: str) -> Path:
        found = next((f / file for f in self._folders if (f / file).is_file()), None)
        if found is None:
            raise SystemExit(f"{file} is not in {self._folders[0]}: give a checkout of kvcache-ai/Mooncake")
        return found

    def run(self, suite: Suite) -> Outcome:
        start = time.monotonic()
        self._more = FROM_ENVIRONMENT if suite.tier == 2 else {}
        with contextlib.ExitStack() as stack:
            for need in suite.needs:
                if need in SERVERS:
                    port, command = SERVERS[need]
                    stack.enter_context(self._process(f"{suite.name} {need}", command, port))
            if "target" in suite.needs:
                target = [sys.executable, str(self.find("transfer_engine_target.py"))]
                stack.enter_context(self._process(f"{suite.name} target", target, ready="Target server ready"))
            passed, failed = self._run(suite)
        return Outcome(suite, passed, tuple(failed), time.monotonic() - start)

    def _run(self, suite: Suite) -> tuple[int, list[str]]:
        if "pair" in suite.needs:
            return self._pair(suite)
        if "script" in suite.needs:
            code = self._call(suite.name, [sys.executable, str(self.find(suite.file))])
            return (suite.tests, []) if code == 0 else (0, [suite.file])
        return self._pytest(suite)

    def _pytest(self, suite: Suite) -> tuple[int, list[str]]:
        file = self.find(suite.file)
        report = self._work / f"{suite.name}.xml"
        what = [f"{file}::{s}" for s in suite.select] or [str(file)]
        without = [f"not {name}" for name in suite.leave_out]
        options = ["-q", "--timeout=120", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if without:
            options += ["-k", " and ".join(without)]
        self._call(suite.name, [sys.executable, "-m", "pytest", *options, *what])
        return _counts(report)

    def _pair(self, suite: Suite) -> tuple[int, list[str]]:
        """Two processes that wait for each other: one test."""
        command = [sys.executable, str(self.find(suite.file)), "--client-id"]
        with self._process(f"{suite.name} 2", [*command, "client2"]) as other:
            code = self._call(suite.name, [*command, "client1"]) or other.wait(60)
        return (1, []) if code == 0 else (0, [suite.file])

    def _call(self, name: str, command: Sequence[str]) -> int:
        with self._process(name, command) as process:
            try:
                return process.wait(_SUITE_S)
            except subprocess.TimeoutExpired:
                return -1

    @contextlib.contextmanager
    def _process(
        self, name: str, command: Sequence[str], port: int = 0, ready: str = ""
    ) -> Iterator[subprocess.Popen[bytes]]:
        log = self._work / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self._environment, **self._more},
                cwd=self._work,
                start_new_session=True,
            )
        try:
            if port and not _within(lambda: _listens(port) or process.poll() is not None):
                raise SystemExit(f"{name} does not listen at {port}:\n{log.read_text(errors='replace')[-2000:]}")
            if ready and not _within(lambda: ready in log.read_text(errors="replace") or process.poll() is not None):
                print(f"{name} is not ready; its log: {log}", file=sys.stderr)
            yield process
        finally:
            _end(process)


def _helpers(folder: Path) -> list[str]:
    """Where the packages are that a helper of the tests imports and Moonpool does not need: installed for this run if missing."""
    if importlib.util.find_spec("msgpack"):
        return []
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "msgpack"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"no msgpack, so test_put_get_tensor.py will not load: {done.stderr[-500:]}", file=sys.stderr)
    return [str(folder)]


def _within(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _counts(report: Path) -> tuple[int, list[str]]:
    """Functions that passed, and the names of those that did not (with parameters: once)."""
    if not report.is_file():
        return 0, ["no report"]
    bad: dict[str, str] = {}
    seen: set[str] = set()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name', '').split('[')[0]}"
        seen.add(name)
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                bad[name] = f"{name}: {kind}: {(found.get('message') or '').splitlines()[0][:120]}"
    return len(seen - bad.keys()), list(bad.values())


def report(outcomes: Sequence[Outcome], *, complete: bool) -> None:
    rows = [
        (o.suite.name, str(o.suite.tier), f"{min(o.passed, o.suite.tests)}/{o.suite.tests}", f"{o.seconds:.1f} s")
        for o in outcomes
    ]
    totals = {
        f"tier{t}_{what}": sum(n for o, n in pairs if o.suite.tier == t)
        for what, pairs in (
            ("passed", [(o, min(o.passed, o.suite.tests)) for o in outcomes]),
            ("total", [(o, o.suite.tests) for o in outcomes]),
        )
        for t in (1, 2)
    }
    rows += [(f"tier {t}", "", f"{totals[f'tier{t}_passed']}/{totals[f'tier{t}_total']}", "") for t in (1, 2)]
    figures.show("Mooncake's own tests on the drop-in", rows, ("suite", "tier", "passed", "time"))
    for o in outcomes:
        for failure in o.failed:
            print(f"FAILED {o.suite.file} {failure}")
    if complete:
        print(figures.write("conformance", dict(sorted(totals.items()))))


def _namespace() -> list[str]:
    """How to start a command where only its own loopback exists; empty if the system does not allow it."""
    prefix = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
    there = shutil.which("unshare") and shutil.which("ip")
    if there and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
        return prefix
    print("no network namespace here: the ports 50051, 50052, 8080 and 9003 must be free", file=sys.stderr)
    return []


def _run_all(suites: Sequence[Suite], tests: Path, work: Path) -> list[Outcome]:
    runner = Runner(tests, work)
    for suite in suites:
        runner.find(suite.file)
    outcomes = []
    for suite in suites:
        outcomes.append(runner.run(suite))
        print(f"{suite.name}: {outcomes[-1].passed} of {suite.tests}", flush=True)
    return outcomes


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", type=Path, help="checkout of kvcache-ai/Mooncake")
    parser.add_argument("--only", default="", help="suites whose name contains this; writes no figures")
    parser.add_argument("--logs", type=Path, help="keep the logs here")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work is None:
        return _outside(arguments, options.logs)
    suites = [s for s in SUITES if options.only in s.name]
    outcomes = _run_all(suites, options.tests.resolve(), options.work)
    report(outcomes, complete=not options.only)
    return int(any(o.passed < o.suite.tests for o in outcomes if o.suite.tier == 1))


def _outside(arguments: Sequence[str], logs: Path | None) -> int:
    """What needs the network, then the run itself in a namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="moonpool-conformance-") as folder:
        helpers = _helpers(Path(folder, "helpers"))
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *helpers])
        command = [*_namespace(), sys.executable, "-m", "benchmarks.conformance", *arguments, "--work", folder]
        try:
            return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
        finally:
            if logs:
                shutil.copytree(folder, logs, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run", "helpers"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
