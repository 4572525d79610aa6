"""The page of a run in a browser: narrow and wide, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

SCHEMES = {"light": 1, "dark": 0}  # as the setting of Chromium's renderer counts them
FRAMES = """<!doctype html><title>frames</title>
<iframe src="report.html" width="390" height="800"></iframe><iframe src="report.html" width="1280" height="800"></iframe>
<script>
addEventListener("load", () => {
    const found = [...document.querySelectorAll("iframe")].map(frame => {
        const page = frame.contentDocument.documentElement;
        const style = frame.contentWindow.getComputedStyle(frame.contentDocument.body);
        const { loadEventEnd, startTime } = frame.contentWindow.performance.getEntriesByType("navigation")[0];
        return { wide: page.scrollWidth, width: page.clientWidth, color: style.color, ms: loadEventEnd - startTime,
                 charts: frame.contentDocument.querySelectorAll("svg").length };
    });
    document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
});
</script>"""


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def frames_in(folder, scheme):
    """What the two frames measured, and what the browser wrote to its console."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--window-size=1800,900"]
        command += ["--virtual-time-budget=10000", f"http://127.0.0.1:{server.server_address[1]}/frames.html"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        server.shutdown()
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "favicon" not in line]
    return json.loads(re.search(r"<pre>(.*)</pre>", done.stdout)[1]), console


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not here")
def test_a_browser_shows_the_page_at_any_width_in_light_and_dark(finished_run, tmp_path) -> None:
    page = finished_run[0] / "report.html"
    assert page.stat().st_size < 10**6
    shutil.copy(page, tmp_path / "report.html")
    (tmp_path / "frames.html").write_text(FRAMES)
    colors = {}
    for scheme in SCHEMES:
        frames, console = frames_in(tmp_path, scheme)
        assert console == []
        for frame, width in zip(frames, (390, 1280), strict=True):
            assert width - 20 <= frame["width"] <= width  # less a scroll bar at its side
            assert frame["wide"] <= frame["width"], f"{scheme}: {frame['wide'] - width} px to scroll at {width}"
            assert frame["ms"] < 5000
            assert frame["charts"] > 0
        colors[scheme] = frames[0]["color"]
    assert colors["light"] != colors["dark"]
