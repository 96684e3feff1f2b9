"""Picture of the live page: a job trains MNIST on this machine, loses a replica, and its page is photographed after a
minute: `make screenshot`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "distbelief"]
JOB = "train mnist downpour --replicas 4 --shards 2 --restarts 3 --optimizer adagrad --lr 0.02 --epochs 100"
SECONDS = 25.0
"""Time before the death of a replica, and after it."""
SIZE = {"width": 1400, "height": 860}


def main(out: str = "docs/watch.png") -> None:
    """Write the picture."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        run = Path(folder) / "mnist-downpour"
        words = [*JOB.split(), "--target-accuracy", "0.999", "--quiet", "--out", run.name]
        job = subprocess.Popen([*COMMAND, *words], cwd=folder)
        while not (run / "timeline.msgpack").exists() and job.poll() is None:
            time.sleep(1.0)
        page = subprocess.Popen(
            [*COMMAND, "watch", run.name, "--control"], cwd=folder, stdout=subprocess.PIPE, text=True
        )
        assert page.stdout is not None
        address = page.stdout.readline().removeprefix("page: ").strip()
        browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        try:
            tab = browser.new_page(viewport=SIZE, color_scheme="light")
            tab.goto(address)
            time.sleep(SECONDS)
            tab.get_by_label("Kill replica 2").click()
            tab.wait_for_selector("#learning .main-svg")
            time.sleep(SECONDS)
            tab.screenshot(path=out)
            Image.open(out).quantize(128).save(out, optimize=True)  # a third of the size
        finally:
            browser.close()
            page.terminate()
            job.terminate()
            page.communicate()
            job.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
