"""Kill a run and start it again, in processes forked from this one, which has imported everything: `kills.py CASES OUT CHAIN`.

This one must never have trained: autograd's threads do not survive a fork.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import chains
import torch

import compresskit as ck


def warm(folder):
    """Import, once for all children, what a run imports on its way."""
    model, example = chains.Net().eval(), (torch.zeros(2, 1, 8, 8),)
    quantized = ck.quant.quantize_static(model, [(torch.randn(8, 1, 8, 8),)])
    ck.verify_onnx(ck.export_onnx(quantized, folder / "warm.onnx", example), quantized, [example])
    ck.count_macs(model, example)


def forked(work, *, stderr=None):
    """Run `work` in a child; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            if stderr is not None:
                sys.stderr = stderr.open("w")
            work()
        except SystemExit as end:
            print(end, file=sys.stderr, flush=True)
            code = 1
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            code = 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def at_event(number, act=die):
    """Call `act` just before the `number`-th time that something on disk changes."""
    seen = [0]

    def wrapped(real):
        def call(*args, **kwargs):
            seen[0] += 1
            if seen[0] == number:
                act()
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, wrapped(getattr(os, name)))
    return seen


def after(seconds, act=die):
    """Call `act` after so many seconds, wherever the run is."""
    thread = threading.Thread(target=lambda: (time.sleep(seconds), act()), daemon=True)
    thread.start()


def bits(out):
    """The digest of every file that must be the same; rows and reports hold times."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in ("row.json", "report.json", "report.html", "report.csv", ".lock")
    }


def count_events(name, out, **settings):
    """Run to the end, undisturbed; how often something on disk changed, and how many seconds it took."""
    reader, writer = os.pipe()

    def work():
        begin, seen = time.perf_counter(), at_event(0)
        chains.run(name, out, **settings)
        os.write(writer, f"{seen[0]} {time.perf_counter() - begin}".encode())

    assert forked(work) == 0
    events, seconds = os.read(reader, 100).split()
    return int(events), float(seconds)


def killed_once(name, out, arm, **settings):
    """Whether a run that is killed where `arm` says was killed; then it is started again and ends."""

    def work():
        arm()
        chains.run(name, out, **settings)

    code = forked(work)
    assert code in (0, -signal.SIGKILL), code
    assert forked(lambda: chains.run(name, out, **settings)) == 0
    return code != 0


def killed_again_and_again(name, out, seed, most, **settings):
    """How often a run was killed, always within the first `most` writes after it was started, until it was done."""
    draw, kills = random.Random(seed), 0
    while True:
        number = draw.randint(2, most)

        def work(number=number):
            at_event(number)
            chains.run(name, out, **settings)

        code = forked(work)
        assert code in (0, -signal.SIGKILL), code
        if code == 0:
            return kills
        kills += 1
        assert kills < 1000


def writes(out, name):
    """Killed often, each time a few writes after it was started."""
    events, _ = count_events(name, out / "whole")
    (out / "whole" / "report.json").unlink()
    last, _ = count_events(name, out / "whole")  # times and the report, which a run that is killed there begins again
    assert events > 2 * last
    for seed in (1, 2):
        kills = killed_again_and_again(name, out / f"often{seed}", seed=seed, most=2 * last)
        assert kills > 2
        assert bits(out / f"often{seed}") == bits(out / "whole")
        print(kills, "kills")


def every_write(out, name):
    """Killed once, at one write in fifteen, each time from the start."""
    events, _ = count_events(name, out / "whole")
    wanted = bits(out / "whole")
    for number in range(1, events, max(1, events // 16)):
        folder = out / str(number)
        assert killed_once(name, folder, lambda number=number: at_event(number))
        assert bits(folder) == wanted, f"killed at write {number} of {events}"
        print("killed at write", number, "of", events)


def moments(out, name):
    """Killed once, after some time, each time from the start."""
    _, seconds = count_events(name, out / "whole")
    for i in range(6):
        folder = out / str(i)
        killed_once(name, folder, lambda i=i: after(seconds * (i + 0.5) / 6))
        assert bits(folder) == bits(out / "whole")


def signals(out, name):
    """SIGINT and SIGTERM in the fourth step: the run is saved there, says so and ends with 1."""
    rarely = {"save": ck.Every(seconds=None, steps=10**6)}
    if not (out / "whole").exists():  # how often a run is saved changes no bits
        count_events(name, out / "whole", **rarely)
    for number in (signal.SIGINT, signal.SIGTERM):

        def stopped(number=number):
            real, steps = ck.mixed.Run.step, [0]
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored

            def step(self, closure=None):
                steps[0] += 1
                if steps[0] == 4:
                    os.kill(os.getpid(), number)
                return real(self, closure)

            ck.mixed.Run.step = step
            chains.run(name, out / number.name, **rarely)

        assert forked(stopped, stderr=out / "said") == 1
        lines = (out / "said").read_text().splitlines()
        said = "\n".join(line for line in lines if "this processor has no instructions for bf16" not in line)
        assert said.startswith(f"stopped by {number.name}; saved 1-train, train, epoch 1, batch "), said
        assert "Run the same command again to go on" in said
        assert (out / number.name / "1-train" / "progress" / "1-4.safetensors").exists()
        assert forked(lambda number=number: chains.run(name, out / number.name, **rarely)) == 0
        assert bits(out / number.name) == bits(out / "whole")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases, folder, chain = sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3]
    warm(folder)
    gc.freeze()  # a collection in a child would copy every page of memory that it shares with this process
    for case in cases:
        {"writes": writes, "every_write": every_write, "moments": moments, "signals": signals}[case](folder, chain)
