"""The HTML page in a real browser: no script errors, complete figures, no injected markup, light and dark."""

import re
import shutil
import subprocess

import pytest

from .reports import gpt_report, hostile_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on PATH")

HOVER = """<script>
for (const svg of document.querySelectorAll("figure.lt-stack svg")) {
  const box = svg.getBoundingClientRect();
  for (let moved = 0; moved < 400; moved++) {
    svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
    if (svg.parentNode.querySelector(".lt-tip :is(p, span) *")) document.title = "a name became markup";
  }
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * .5, clientY: box.top + 50}));
}
</script>"""


def browse(tmp_path, page, *options):
    """Return the document after its scripts have run, and the lines of the console."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    ran = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1600",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", *options, file.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return ran.stdout, re.findall(r":CONSOLE.*", ran.stderr)


def with_script(report, script):
    return report.to_html().replace("</body>", f"{script}</body>")


def test_script_errors_reach_the_console(tmp_path):
    _, console = browse(tmp_path, with_script(gpt_report(), "<script>nonsense()</script>"), "--dump-dom")
    assert any("nonsense is not defined" in line for line in console)


@pytest.mark.parametrize("make", [gpt_report, hostile_report])
def test_the_cursor_shows_live_bytes_without_script_errors(make, tmp_path):
    document, console = browse(tmp_path, with_script(make(), HOVER), "--dump-dom")
    assert console == []
    assert "<title>lowtide report</title>" in document
    assert document.count("<figure") == 3
    assert document.count('class="lt-tip"') == 2
    for tip in re.findall(r'<div class="lt-tip"[^>]*>(.*?)</div></div>', document, re.S):
        assert re.search(r"<span>all</span><b>[\d.]+ [KMG]iB</b>", tip)
    assert 'data-live="yes"' in document


def test_the_page_is_complete_without_scripts(tmp_path):
    page = re.sub(r"<script>.*?</script>", "", gpt_report().to_html(), flags=re.S)
    document, console = browse(tmp_path, page, "--dump-dom")
    assert console == []
    assert document.count("<path") > 10
    assert 'class="lt-legend"' in document


@pytest.mark.parametrize(("scheme", "dark"), [("0", True), ("1", False)])
def test_the_page_follows_the_light_or_dark_setting(scheme, dark, tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="reading the screenshot needs matplotlib")
    shot = tmp_path / "page.png"
    browse(
        tmp_path, gpt_report().to_html(), f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}"
    )  # fmt: skip
    pixels = image.imread(str(shot))[..., :3]
    corner, mean = pixels[2, 2].mean(), pixels.mean()
    assert (corner < 0.2 and mean < 0.4) if dark else (corner > 0.9 and mean > 0.75)
    assert pixels.reshape(-1, 3).std(axis=0).min() > 0.05  # not an empty page
