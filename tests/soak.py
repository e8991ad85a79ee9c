"""Runs the random programs of tests/tables/checks.py, or kills of placed runs, over a range of numbers.

    python tests/soak.py 20000:40000             # programs of these seeds, in as many processes as there are cores
    python tests/soak.py 20317 --show            # prints one program, and runs it
    python tests/soak.py --kills 0:500           # kills of these numbers (tests/training/test_placed_kills.py)

Each block that is done is printed with its time, so that a soak may be stopped anywhere and continued from there. It
stops at the first number that fails, or that ends by a signal, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS, KILLS = 500, 50  # in a block: one process


def range_of(text: str) -> range:
    """``20000:40000``, or ``317`` for one number."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def run_block(seeds: range, show: bool) -> None:
    """Run programs in this process; the seed that runs is printed, so that a crash has a number."""
    sys.path[:0] = [str(HERE / "tables")]
    import torch
    from checks import check, program

    torch.set_num_threads(1)  # the programs are tiny
    for seed in seeds:
        print(seed, flush=True)
        if show:
            case = program(seed)
            for name in (
                "tables",
                "steps",
                "optimizer",
                "strategy",
                "mode",
                "scale",
                "autocast",
                "staged",
                "lookahead",
            ):
                print(f"{name}: {getattr(case, name)}")
            print(*case.rounds, sep="\n")
        try:
            found = check(seed)
        except BaseException:
            found = traceback.format_exc()
        if found:
            sys.exit(f"seed {seed}: {found}")


class Block:
    """Programs or kills in a process of its own."""

    def __init__(self, numbers: range, kills: bool) -> None:
        self.numbers, self.kills = numbers, kills
        self.process: subprocess.Popen[str] | None = None
        self.failed: int | None = None  # the number, or the first of the block
        self.messages, self.seconds = "", 0.0

    def __call__(self) -> Block:
        name, begin = f"{self.numbers.start}:{self.numbers.stop}", time.monotonic()
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, str(HERE / "soak.py"), "--block", name]
        if self.kills:
            environment["STOKER_KILLS"] = name
            tests = HERE / "training" / "test_placed_kills.py"
            command = [sys.executable, "-m", "pytest", str(tests), "-x", "--timeout=0", "-p", "no:cacheprovider"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=HERE.parent
        )
        assert self.process.stdout is not None
        lines = list(self.process.stdout)
        code = self.process.wait()
        self.seconds = time.monotonic() - begin
        if code:
            numbers = [int(line) for line in lines if line.strip().isdigit()]
            self.failed = numbers[-1] if numbers else self.numbers.start
            self.messages = "".join(line for line in lines if not line.strip().isdigit())
            if code < 0:
                self.messages += f"The process ended by {signal.Signals(-code).name}.\n"
        return self


def soak(numbers: range, *, kills: bool, processes: int) -> int:
    """All blocks; 0 if every number did well."""
    what, size = ("kills", KILLS) if kills else ("programs", PROGRAMS)
    option = "--kills " if kills else ""
    begin, done = time.monotonic(), 0
    blocks = [
        Block(range(first, min(first + size, numbers.stop)), kills)
        for first in range(numbers.start, numbers.stop, size)
    ]
    waiting, running = list(blocks), set[Future[Block]]()
    stopped = threading.Event()
    with ThreadPoolExecutor(processes) as pool:
        try:
            while (waiting or running) and not stopped.is_set():
                while waiting and len(running) < processes:
                    running.add(pool.submit(waiting.pop(0)))
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for block in (future.result() for future in finished):
                    if block.failed is not None:
                        print(block.messages)
                        print(
                            f"Failed. Repeat it with: python tests/soak.py {option}{block.failed}"
                            f"{'' if kills else ' --show'}"
                        )
                        stopped.set()
                        continue
                    done += len(block.numbers)
                    print(
                        f"{block.numbers.start}:{block.numbers.stop} done in {block.seconds:.0f} s; "
                        f"{done:,} of {len(numbers):,} {what} in {time.monotonic() - begin:.0f} s",
                        flush=True,
                    )
        except KeyboardInterrupt:
            stopped.set()
        finally:
            for block in blocks:
                if block.process is not None and block.process.poll() is None:
                    block.process.terminate()
    left = [block for block in blocks if block.failed is not None or block.process is None or block.process.returncode]
    if left:
        print(
            f"{done:,} {what} did well. Continue with: "
            f"python tests/soak.py {option}{left[0].numbers.start}:{numbers.stop}"
        )
        return 1
    print(f"{done:,} {what}, {numbers.start}:{numbers.stop}: all well, in {time.monotonic() - begin:.0f} s")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=range_of, help="FIRST:LAST, the last excluded, or one number")
    parser.add_argument("--kills", action="store_true", help="kill placed runs instead of running programs")
    parser.add_argument("--show", action="store_true", help="print each program, in this process")
    parser.add_argument("--block", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if given.show or given.block:
        run_block(given.numbers, given.show)
        return 0
    return soak(given.numbers, kills=given.kills, processes=1 if given.kills else given.processes)


if __name__ == "__main__":
    sys.exit(main())
