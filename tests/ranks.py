"""One pool of rank processes for the whole test session: ``run_ranks(world_size, fn, *args)``.

A rank takes seconds to start (the torch import), so up to eight processes are started once, on first use,
and serve every multi-rank test. Each call gets a new default gloo group over the first ``world_size``
processes (tens of milliseconds) and the environment that torchrun would set, so nothing leaks from one test
to the next except module state. An exception, a hang or the death of a process is reported with its rank;
after a hang or a death the pool is torn down, and the next call starts another.

Tests reach it through the ``ranks`` fixture of ``conftest.py``, which also keeps them on one xdist worker.
Everything stays on the loopback interface; ports are bound by the kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_runtime.comm.groups import RankGroup

__all__ = ["MAX_WORLD_SIZE", "RankContext", "RankError", "RankPool", "run_ranks", "shutdown_ranks"]

MAX_WORLD_SIZE = 8
DEFAULT_TIMEOUT_S = 120.0
PEER_GRACE_S = 10.0
START_TIMEOUT_S = 240.0  # long: the machine may be busy; a rank that dies is seen at once
STACK_WAIT_S = 10.0
LOG_TAIL_BYTES = 4000

_TESTS_DIR = Path(__file__).resolve().parent
# A rank loads this file under the name it has in pytest: pickled classes are the same on both sides.
_BOOTSTRAP = """
import importlib.util, sys, types
package = types.ModuleType("tests")
package.__path__ = [sys.argv[1]]
sys.modules["tests"] = package
spec = importlib.util.spec_from_file_location("tests.ranks", sys.argv[1] + "/ranks.py")
module = importlib.util.module_from_spec(spec)
sys.modules["tests.ranks"] = module
spec.loader.exec_module(module)
module._worker_main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """First argument of a function run by ``run_ranks``.

    Attributes:
        rank: Index of this process in the group, 0 to ``world_size - 1``.
        world_size: Number of ranks in this call.
        process_group: The default gloo group of this call (also ``dist.group.WORLD``).
    """

    rank: int
    world_size: int
    process_group: dist.ProcessGroup

    @property
    def group(self) -> RankGroup:
        """The same as the package's own type."""
        from moe_runtime.comm.groups import RankGroup  # not for those who only start processes

        return RankGroup(rank=self.rank, size=self.world_size, process_group=self.process_group)


class RankError(AssertionError):
    """A rank raised, hung or died. ``failures`` maps each failed rank to its text; ``rank`` failed first."""

    def __init__(self, message: str, *, rank: int, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = failures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    job_id: int
    world_size: int
    timeout_s: float
    master_port: int
    module_name: str
    module_path: str
    qualname: str
    args_pickle: bytes  # loaded by the rank once the test module is there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    job_id: int
    result_pickle: bytes | None
    error: str | None
    at_s: float  # system-wide monotonic clock: tells which rank failed first


@dataclass(slots=True, kw_only=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log_path: Path

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return ""


@dataclass(slots=True)
class RankPool:
    """Rank processes 0, 1, ..., grown to the largest world size asked for so far."""

    workers: list[_Worker] = field(default_factory=list)
    _store: Any = None
    _store_port: int = 0
    _job_store: Any = None
    _log_dir: tempfile.TemporaryDirectory[str] | None = None
    _num_jobs: int = 0

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, of the processes that are running now."""
        return [worker.process.pid for worker in self.workers]

    def run(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Call ``fn(RankContext, *args)`` on ``world_size`` ranks.

        Args:
            world_size: 1 to ``MAX_WORLD_SIZE``.
            fn: A module-level function; a rank finds it by file and qualified name.
            *args: Picklable; every rank gets its own copy.
            timeout_s: Seconds after which ranks that have not answered count as hung.

        Returns:
            What ``fn`` returned, by rank.

        Raises:
            RankError: A rank raised, hung or died.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size ({world_size}) must be between 1 and {MAX_WORLD_SIZE}")
        module_name, module_path, qualname = _address_of(fn)
        args_pickle = pickle.dumps(args)
        try:
            self._grow(world_size)
            self._num_jobs += 1
            # For env:// in fn: a store of its own, since torch would find the last call's addresses in a shared one.
            self._job_store, master_port = _loopback_store()
            job = _Job(
                job_id=self._num_jobs,
                world_size=world_size,
                timeout_s=timeout_s,
                master_port=master_port,
                module_name=module_name,
                module_path=module_path,
                qualname=qualname,
                args_pickle=args_pickle,
            )
            for worker in self.workers[:world_size]:
                # A rank that has died since the last call: its connection reports that below.
                with contextlib.suppress(OSError):
                    worker.connection.send(job)
            replies = self._collect(job)
        except RankError:
            raise
        except BaseException:
            self.shutdown()  # interrupted (pytest-timeout, Ctrl-C) while ranks are busy: start over next time
            raise
        failed = sorted((r for r in replies if replies[r].error is not None), key=lambda r: replies[r].at_s)
        if failed:
            raise _failure({rank: replies[rank].error or "" for rank in failed}, first=failed[0])
        return [pickle.loads(replies[rank].result_pickle or b"") for rank in range(world_size)]

    def shutdown(self) -> None:
        """Kill every rank and forget the pool; the next ``run`` starts another."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.connection.close()
        self.workers.clear()
        self._store = self._job_store = None
        if self._log_dir is not None:
            self._log_dir.cleanup()
            self._log_dir = None

    def _grow(self, world_size: int) -> None:
        if self._store is None:
            self._store, self._store_port = _loopback_store()
            self._log_dir = tempfile.TemporaryDirectory(prefix="moe-ranks-")
        started = [self._spawn(rank) for rank in range(len(self.workers), world_size)]
        self.workers += started
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for worker in started:
            with contextlib.suppress(EOFError, OSError):
                if worker.connection.poll(max(0.0, deadline_s - time.monotonic())):
                    worker.connection.recv()
                    continue
            tail = worker.log_tail()
            raise RuntimeError(f"rank {worker.rank} did not start within {START_TIMEOUT_S:.0f} s:\n{tail}")

    def _spawn(self, rank: int) -> _Worker:
        assert self._log_dir is not None, "the log folder is made before the first rank"
        ours, theirs = Pipe()
        log_path = Path(self._log_dir.name) / f"rank{rank}.log"
        command = [sys.executable, "-P", "-c", _BOOTSTRAP]
        command += [str(_TESTS_DIR), str(theirs.fileno()), str(rank), str(self._store_port)]
        variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback()}
        with theirs, log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
            )
        return _Worker(rank=rank, process=process, connection=ours, log_path=log_path)

    def _collect(self, job: _Job) -> dict[int, _Reply]:
        """Replies by rank. Tears the pool down and raises when a rank hangs or dies."""
        replies: dict[int, _Reply] = {}
        deadline_s = time.monotonic() + job.timeout_s
        while len(replies) < job.world_size:
            missing = [w for w in self.workers[: job.world_size] if w.rank not in replies]
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise self._hung(missing, replies, job)
            ready = wait([w.connection for w in missing], remaining_s)
            for worker in missing:
                if worker.connection not in ready:
                    continue
                try:
                    reply = worker.connection.recv()
                except (EOFError, OSError):
                    raise self._died(worker, replies) from None
                if reply.job_id != job.job_id:
                    continue
                replies[worker.rank] = reply
                if reply.error is not None:  # its peers may wait for it inside a collective
                    deadline_s = min(deadline_s, time.monotonic() + PEER_GRACE_S)
        return replies

    def _hung(self, missing: list[_Worker], replies: dict[int, _Reply], job: _Job) -> RankError:
        for worker in missing:
            _ask_for_stack(worker)
        failures = {rank: reply.error for rank, reply in replies.items() if reply.error is not None}
        first = min(failures, key=lambda rank: replies[rank].at_s) if failures else missing[0].rank
        limit = "after another rank had failed" if failures else f"within {job.timeout_s:.0f} s"
        for worker in missing:
            failures[worker.rank] = f"did not return {limit}; its stack:\n{worker.log_tail()}"
        self.shutdown()
        return _failure(failures, first=first)

    def _died(self, worker: _Worker, replies: dict[int, _Reply]) -> RankError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(30)
        text = f"process died with exit code {worker.process.returncode}; its output:\n{worker.log_tail()}"
        failures = {worker.rank: text} | {r: reply.error for r, reply in replies.items() if reply.error}
        self.shutdown()
        return _failure(failures, first=worker.rank)


_POOL = RankPool()


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """``RankPool.run`` on the session's pool. Tests take it as the ``ranks`` fixture."""
    return _POOL.run(world_size, fn, *args, timeout_s=timeout_s)


def shutdown_ranks() -> None:
    """Stop the session's pool, if it was started."""
    _POOL.shutdown()


def _ask_for_stack(worker: _Worker) -> None:
    """Have faulthandler write the stacks of all threads to the log; returns when they are there, or after a while."""
    before_bytes = worker.log_path.stat().st_size
    worker.process.send_signal(signal.SIGUSR1)
    deadline_s = time.monotonic() + STACK_WAIT_S
    last_bytes = before_bytes
    while time.monotonic() < deadline_s:
        time.sleep(0.1)
        size_bytes = worker.log_path.stat().st_size
        if size_bytes == last_bytes > before_bytes:
            return
        last_bytes = size_bytes


def _failure(failures: dict[int, str], *, first: int) -> RankError:
    order = [first, *sorted(set(failures) - {first})]
    parts = [f"rank {first} failed first, {len(failures)} in all"]
    parts += [f"--- rank {rank} ---\n{failures[rank].rstrip()}" for rank in order]
    return RankError("\n".join(parts), rank=first, failures=failures)


def _address_of(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Module name, file and qualified name of a function that another process can find."""
    qualname = getattr(fn, "__qualname__", "")
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if not qualname or found is not fn or getattr(module, "__file__", None) is None:
        raise TypeError(
            "run_ranks needs a module-level function, which another process can find by file and name; "
            f"{fn!r} is a closure, lambda, partial or bound method. Move it to module level, pass its data "
            "as arguments."
        )
    return module.__name__, str(module.__file__), qualname


def _loopback_store() -> tuple[Any, int]:
    import torch.distributed as dist

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


# ---- inside a rank process


def _worker_main(connection_fd: int, rank: int, store_port: int) -> None:
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it kills the ranks
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    connection = Connection(connection_fd)
    connection.send(rank)
    jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(connection, jobs), daemon=True).start()
    while True:
        _run_job(jobs.get(), rank, store, connection)


def _read_jobs(connection: Connection, jobs: queue.SimpleQueue[_Job]) -> None:
    """Runs beside the job, so that a rank stuck in a collective still ends with its parent."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.put(connection.recv())
    os._exit(1)


def _run_job(job: _Job, rank: int, store: Any, connection: Connection) -> None:
    import torch.distributed as dist

    result: bytes | None = None
    error: str | None = None
    _set_torchrun_environment(job, rank)
    try:
        # The group of the last call goes only now, when every rank of it has answered: a rank that closed its
        # connections earlier could break a peer that was still busy.
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"job{job.job_id}", store),
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s + 30),  # the parent's limit comes first
        )
        group = dist.group.WORLD
        assert group is not None, "the default group was just made"
        dist.barrier()  # or a rank that ends at once could leave a peer that is still connecting
        fn = _load(job)
        context = RankContext(rank=rank, world_size=job.world_size, process_group=group)
        result = pickle.dumps(fn(context, *pickle.loads(job.args_pickle)))
    except BaseException:
        error = traceback.format_exc()
    reply = _Reply(job_id=job.job_id, result_pickle=result, error=error, at_s=time.monotonic())
    connection.send(reply)
    if error is not None:
        _abort_default_group()


def _abort_default_group() -> None:
    """Close the connections, so that peers inside a collective raise instead of waiting."""
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        group = dist.group.WORLD
        if group is not None:
            group.abort()
        if dist.is_initialized():
            dist.destroy_process_group()


def _set_torchrun_environment(job: _Job, rank: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _load(job: _Job) -> Callable[..., Any]:
    module = sys.modules.get(job.module_name)
    if module is None and Path(job.module_path).is_relative_to(_TESTS_DIR):
        spec = importlib.util.spec_from_file_location(job.module_name, job.module_path)
        assert spec is not None, f"not a Python file: {job.module_path}"
        assert spec.loader is not None, f"no loader for {job.module_path}"
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[job.module_name]
            raise
    found: Any = module or importlib.import_module(job.module_name)
    for name in job.qualname.split("."):
        found = getattr(found, name)
    return found
