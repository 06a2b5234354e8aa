"""The chat page: its files, and what a browser makes of them (headless Chromium)."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edgecc.backends.server import chat_page

if TYPE_CHECKING:
    from edgecc.backends.server import Server

httpx = pytest.importorskip("httpx")

TEXT = "def f(x):"
get = partial(httpx.get, timeout=60)
STATIC = Path(chat_page.__file__).parent / "static"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Nothing that Chromium would ask the network for by itself."""


@pytest.fixture
def server(serve: Any) -> Iterator[Server]:
    """One for each test: some need another one."""
    with serve() as running:
        yield running


def test_the_files_load_nothing_from_elsewhere(server: Server) -> None:
    texts = {}
    for path in chat_page.PAGE_PATHS:
        answer = get(f"{server.url}{path}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        texts[answer.headers["content-type"].partition(";")[0]] = answer.text

    assert set(texts) == {"text/html", "text/css", "text/javascript"}
    everything = re.sub(r"^\s*// .*$", "", "".join(texts.values()), flags=re.MULTILINE)
    for elsewhere in (r"https?:", r"//\w", r"@import", r"url\("):
        assert not re.search(elsewhere, everything)
    for markup in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert markup not in everything
    assert not re.search(r"<style|style=|<script>|\bon\w+=", texts["text/html"])
    assert {path.name for path in STATIC.iterdir()} == set(chat_page._FILES.values())


def test_a_server_without_it(serve: Any) -> None:
    with serve(chat_page=False) as server:
        codes = {get(f"{server.url}{path}").status_code for path in chat_page.PAGE_PATHS}

    assert codes == {404}


def test_it_is_no_part_of_the_api(server: Server) -> None:
    paths = get(f"{server.url}/openapi.json").json()["paths"]

    assert not chat_page.PAGE_PATHS & set(paths)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: install the package chromium of the system")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=CHROMIUM,
            args=QUIET,
            chromium_sandbox=os.geteuid() != 0,  # it refuses to run for root otherwise
        )
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the page of a server in a browser of its own; nothing may go wrong in it."""
    contexts: list[Any] = []
    findings: list[str] = []

    def opened(server: Server, *, complaint: str = "", **options: Any) -> Any:
        """The page; what the browser may complain about is part of a text."""
        url = server.url
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: findings.append(str(error)))

        def console(message: Any) -> None:
            if message.type == "error" and not (complaint and complaint in message.text):
                findings.append(message.text)

        def requested(request: Any) -> None:
            if not request.url.startswith((url, "data:")):
                findings.append(request.url)

        page.on("console", console)
        page.on("request", requested)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert findings == []


def ask(page: Any, text: str = TEXT) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def ended(page: Any) -> None:
    page.locator("#send:enabled").wait_for()


def choose(page: Any, label: str, value: str) -> None:
    page.locator("#settings").evaluate("settings => { settings.open = true; }")
    page.get_by_label(label).fill(value)


def expected(server: Server, *turns: str, **options: Any) -> Any:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    body = {"messages": messages, "max_tokens": 48, "temperature": 0, **options}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()


def test_a_conversation(server: Server, opened: Any) -> None:
    page = opened(server)
    choose(page, "Temperature", "0")
    choose(page, "Most tokens", "48")
    ask(page)
    ended(page)
    wanted = expected(server, TEXT)
    answer = wanted["choices"][0]["message"]["content"]
    texts = page.locator(".message .text")

    assert page.title() == "edgecc chat"
    assert page.locator("#model").inner_text() == "tiny"
    assert texts.all_text_contents() == [TEXT, answer]
    runs = page.locator(".run")
    assert "".join(runs.all_text_contents()) == answer
    assert 1 < runs.count() < 48  # several tokens a run
    titles = [run.get_attribute("title") for run in runs.all()]
    told = [int(found[1]) for title in titles if (found := re.match(r"(\d+) of \d+ pro", title))]
    assert sum(told) == wanted["usage"]["accepted_tokens"]
    stats = page.locator("#stats").inner_text()
    assert re.fullmatch(
        r"48 tokens, [\d.]+ tokens/s, [\d.]+ proposals accepted per step, "
        r"first token after \d+ ms; cut at the limit of tokens",
        stats,
    )

    ask(page, "and g?")
    ended(page)
    again = expected(server, TEXT, answer, "and g?")
    assert texts.last.text_content() == again["choices"][0]["message"]["content"]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0


def test_settings(server: Server, opened: Any) -> None:
    page = opened(server)
    sent: list[Any] = []
    page.on("request", lambda request: request.post_data and sent.append(request.post_data_json))
    choose(page, "Most tokens", "7")
    choose(page, "Proposals per round", "2")
    ask(page)
    ended(page)
    choose(page, "Proposals per round", "0")
    ask(page)
    ended(page)
    stats = page.locator("#stats").inner_text()
    choose(page, "Most tokens", "0")
    ask(page)  # not sent

    first, second = sent
    assert (first["max_tokens"], first["num_speculative_tokens"]) == (7, 2)
    assert "temperature" not in first
    assert second["disable_spec_decode"] is True
    assert stats.startswith("7 tokens")
    assert "accepted" not in stats
    assert page.get_by_label("Most tokens").evaluate("field => field.matches(':invalid')")


def test_stop(server: Server, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = server.service.engine
    step = engine._batch.step

    def slow() -> Any:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(engine._batch, "step", slow)
    page = opened(server)
    choose(page, "Most tokens", "300")
    for stop in (
        lambda: page.get_by_role("button", name="Stop").click(),
        lambda: page.keyboard.press("Escape"),
        lambda: page.get_by_role("button", name="New chat").click(),
    ):
        ask(page)
        page.locator(".assistant .run").nth(1).wait_for()
        stop()
        ended(page)
        deadline = time.monotonic() + 30
        while engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.running == 0

    assert page.locator(".message").count() == 0
    assert page.locator("#error").is_hidden()


def test_what_is_refused_is_said_and_given_back(server: Server, opened: Any) -> None:
    page = opened(server, complaint="status of 400")
    ask(page, "a " * 2000)
    ended(page)
    error = page.get_by_role("alert").inner_text()

    assert "384" in error
    assert page.locator(".message").count() == 0
    assert page.get_by_label("Message").input_value() == "a " * 2000


def test_nothing_of_an_answer_becomes_markup(server: Server, opened: Any) -> None:
    page = opened(server)
    choose(page, "Most tokens", "4")
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    ended(page)

    assert page.locator(".user .text").inner_html().startswith("&lt;img")
    assert page.locator(".message img, .message b").count() == 0


def test_a_key(serve: Any, opened: Any) -> None:
    with serve(api_keys=("secret",)) as server:
        page = opened(server, complaint="status of 401")
        assert "API key" in page.get_by_role("alert").inner_text()
        choose(page, "API key", "secret")
        choose(page, "Most tokens", "4")
        ask(page)
        ended(page)
        assert page.locator(".assistant .text").text_content()
        assert page.locator("#error").is_hidden()


def test_a_server_that_has_gone(serve: Any, opened: Any) -> None:
    with serve() as server:
        page = opened(server, complaint="net::ERR_")
        page.locator("#model", has_text="tiny").wait_for()
    page.context.set_offline(True)
    ask(page)
    ended(page)

    assert page.get_by_role("alert").inner_text() == "The server cannot be reached."
    assert page.get_by_label("Message").input_value() == TEXT


CONTRAST = """
() => {
  const parts = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (color) => {
    const [r, g, b] = parts(color).map((v) => v / 255).map(
      (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!color.endsWith(", 0)")) return color;
    }
  };
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !node.checkVisibility() || node.disabled) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
    found[node.tagName + "#" + node.id] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return found;
}
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_can_be_read(server: Server, opened: Any, theme: str, tmp_path: Path) -> None:
    """Contrast of WCAG 2.2 (1.4.3), computed from the colours the browser chose."""
    page = opened(server, color_scheme=theme, viewport={"width": 900, "height": 700})
    choose(page, "Most tokens", "60")
    choose(page, "Temperature", "0")
    ask(page)
    ended(page)
    contrast = page.evaluate(CONTRAST)
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    if folder := os.environ.get("EDGECC_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"chat-{theme}.png")

    assert len(contrast) > 8
    assert {name: ratio for name, ratio in contrast.items() if ratio < 4.5} == {}
    red = int(re.findall(r"\d+", ground)[0])
    assert (red > 200) is (theme == "light")


def test_on_a_phone(server: Server, opened: Any) -> None:
    page = opened(server, viewport={"width": 360, "height": 640}, has_touch=True)
    choose(page, "Most tokens", "30")
    ask(page, "a" * 200)
    ended(page)
    wide = page.evaluate("() => document.documentElement.scrollWidth")

    assert wide <= 360
    for name in ("Send", "Stop", "New chat"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
