"""Look at the report and the site in a headless browser: `python -m tests.docs.look [LOG ...] [--out FOLDER] [--site]`.

Takes a picture of every page at both widths, and fails where one has an error on its console, or is wider than its
window. Pages are shown in frames, so that a window may be narrower than the browser's least. Needs Chromium (`apt-get
install chromium`), and nothing from elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import html
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hetu_fx.report.page import html_page
from hetu_fx.report.read import read_log
from hetu_fx.report.run import LoggedRun
from tests.report.logs import log

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 390)
HEIGHT = 3000
SECONDS = 60
ON_PAPER = ((2, 1), (4, 60), (64, 10_000))
"""Devices and steps of logs that are looked at besides those given."""

SITE = ("index", "start", "howto/watch", "api", "errors", "integrations", "planning", "scripts", "trainer")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PROBE = """<!DOCTYPE html><html><body style="margin:0"><output id="found" hidden></output><script>
const widths = %s, found = {};
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `display:block;border:0;width:${width}px;height:%dpx`;
  frame.src = "/%s";
  frame.onload = () => {
    found[width] = frame.contentDocument.documentElement.scrollWidth;
    if (Object.keys(found).length === widths.length)
      document.getElementById("found").textContent = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script></body></html>
"""


def main() -> int:
    """Write the pages, look at each, and say what is wrong."""
    made = argparse.ArgumentParser(description="Look at the report and the site in a headless browser.")
    made.add_argument("logs", nargs="*", type=Path, help="logs of runs, as model.hetu.log wrote them")
    made.add_argument("--out", type=Path, default=ROOT / "build" / "look", help="folder for pages and pictures")
    made.add_argument("--site", action="store_true", help="look at the site too (make docs has built it)")
    options = made.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no browser: install one of {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    pages = write_pages(options.out / "pages", options.logs, with_site=options.site)
    with serving(options.out / "pages") as address:
        faults = [fault for page in pages for fault in look(browser, address, options.out, page)]
    print("\n".join(faults) or f"{len(pages)} pages are good at {' and '.join(map(str, WIDTHS))} pixels; {options.out}")
    return int(bool(faults))


def write_pages(folder: Path, logs: Sequence[Path], *, with_site: bool) -> list[str]:
    """Write the pages to look at, and return their addresses."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reports = {f"paper_{devices}_{steps}": log(devices, steps) for devices, steps in ON_PAPER}
    reports |= {file.stem: list(read_log(file)) for file in logs}
    for name, entries in reports.items():
        (folder / f"{name}.html").write_text(html_page(entries, name), encoding="utf-8")
    (folder / "notebook.html").write_text(notebook_page(), encoding="utf-8")
    pages = [*(f"{name}.html" for name in reports), "notebook.html"]
    if with_site:
        shutil.copytree(ROOT / "build" / "site", folder / "site")
        pages += [f"site/{'' if name == 'index' else name + '/'}index.html" for name in SITE]
    return pages


def notebook_page() -> str:
    """Return pictures of plans in a page of another style, as notebooks show them."""
    plans = [plan for devices in (4, 64) for plan in LoggedRun(log(devices, 1)).plans.values()]
    pictures = "".join(f"<p>a cell</p>{plan._repr_html_()}" for plan in plans)
    return f'<!DOCTYPE html><html><body style="background:#222;color:#eee;font-family:serif">{pictures}</body></html>'


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder at a port of this machine."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *said: object) -> None:
        """Say nothing."""


def look(browser: str, address: str, out: Path, page: str) -> Iterator[str]:
    """Take pictures of a page and yield what is wrong with it."""
    name = re.sub(r"\W+", "_", page.removesuffix(".html"))
    for width in WIDTHS:
        _probe(out, f"{name}_{width}", page, [width])
        size = f"--window-size={max(width, 500)},{HEIGHT}"
        _browse(browser, f"{address}/{name}_{width}.html", size, f"--screenshot={out / f'{name}_{width}.png'}")
    _probe(out, name + "_probe", page, WIDTHS)
    seen = _browse(browser, f"{address}/{name}_probe.html", "--dump-dom")
    yield from (f"{page}: {line}" for line in re.findall(r"CONSOLE.*?\] (.*)", seen.stderr))
    found = re.search(r'<output id="found"[^>]*>(.*?)</output>', seen.stdout)
    widths = json.loads(html.unescape(found[1]) or "{}") if found else {}
    for width in WIDTHS:
        if widths.get(str(width), sys.maxsize) > width:
            yield f"{page}: in a window of {width} pixels it is {widths.get(str(width), 'not shown, or not')} wide"


def _probe(out: Path, name: str, page: str, widths: Sequence[int]) -> None:
    (out / "pages" / f"{name}.html").write_text(PROBE % (json.dumps(widths), HEIGHT, page), encoding="utf-8")


def _browse(browser: str, address: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the browser on an address, as root too, until the page has come to rest."""
    quiet = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    command = [browser, *quiet, "--virtual-time-budget=5000", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


if __name__ == "__main__":
    sys.exit(main())
