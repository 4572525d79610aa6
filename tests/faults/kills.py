"""Kill a run and start it again, in processes that are forked from this one, which has imported everything already."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
import time
import traceback

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
        if path.is_file() and path.name not in ("row.json", "report.json", ".lock")
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


def killed_again_and_again(name, out, seed, most=40, **settings):
    """How often a run was killed, always a few writes after it was started, until it was done."""
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
