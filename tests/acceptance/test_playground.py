"""The playground in a real browser, with a real server whose models say what a test wants."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.support.chromium import PATIENCE_MS, open_chromium, record_complaints
from tests.support.real_server import RealServer, eventually, start_server
from tinkex.engine.fake.scripted import say, scripted_model

FIRST, SECOND = "tinkex/first", "tinkex/second"
MODELS = [scripted_model(name=FIRST), scripted_model(name=SECOND)]
HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = start_server(tmp_path_factory.mktemp("playground"), {"models": MODELS})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with open_chromium() as browser:
        yield browser


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    with chromium.new_context() as opened:
        opened.set_default_timeout(PATIENCE_MS)
        yield opened


@pytest.fixture
def complaints(context: BrowserContext) -> list[str]:
    return record_complaints(context)


@pytest.fixture
def page(server: RealServer, context: BrowserContext, complaints: list[str]) -> Page:
    """The playground, just opened."""
    page = context.new_page()
    page.goto(f"{server.url}/playground")
    return page


def ask(page: Page, text: str) -> None:
    """Send a message and wait for the end of the answer."""
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("#play-status")).to_have_text("The answer is complete.")


def test_chat_keeps_history_and_can_be_changed(page: Page, complaints: list[str]) -> None:
    answers = page.locator(".message.assistant .text:visible")
    ask(page, say("Ahoy!"))
    ask(page, "And again?")
    # The scripted model repeats the last text of the conversation, so it has got the history.
    expect(answers).to_have_text(["Ahoy!", "Ahoy!"])
    expect(page.locator(".message.assistant .note").first).to_contain_text("prompt tokens")

    page.get_by_role("article", name="You").first.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit").fill(say("Goodbye."))
    page.get_by_role("button", name="Send again").click()

    expect(answers).to_have_text(["Goodbye."])
    expect(page.locator(".message.user")).to_have_count(1)
    page.get_by_role("button", name="Regenerate").click()
    expect(answers).to_have_text(["Goodbye."])

    page.get_by_role("article", name="Answer").get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit").fill(say("Changed."))
    page.get_by_role("button", name="Save").click()
    ask(page, "What did you say?")
    expect(answers.last).to_have_text("Changed.")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".message")).to_have_count(0)
    assert complaints == []


def test_two_models_answer_side_by_side(page: Page, complaints: list[str]) -> None:
    page.get_by_label("Compare").check()
    page.get_by_label("Second model", exact=True).select_option(SECOND)
    with page.expect_request("**/v1/chat/completions"):
        ask(page, say("Both."))

    expect(page.get_by_role("article", name=f"Answer of {FIRST}")).to_contain_text("Both.")
    expect(page.get_by_role("article", name=f"Answer of {SECOND}")).to_contain_text("Both.")
    boxes = [each.bounding_box() for each in page.locator(".message.assistant").all()]
    assert boxes[0] and boxes[1]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert complaints == []


def test_hostile_answer_is_text(page: Page, complaints: list[str]) -> None:
    ask(page, say(HOSTILE))

    expect(page.locator(".message.assistant .text:visible")).to_have_text(HOSTILE)
    assert page.locator(".message img, .message b").count() == 0
    assert complaints == []


def test_error_of_server_is_shown(page: Page) -> None:
    page.get_by_label("Model", exact=True).select_option("other")
    page.get_by_label("Model: path or alias", exact=True).fill("tinker://missing/sampler_weights/x")
    page.get_by_role("textbox", name="Message").fill("Hello")
    page.get_by_role("button", name="Send").click()

    expect(page.get_by_role("alert")).to_contain_text("tinker://missing/sampler_weights/x")
    expect(page.locator("#play-status")).to_have_text("The request failed.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_completion_continues_text(page: Page, complaints: list[str]) -> None:
    page.get_by_text("Completion", exact=True).click()
    page.get_by_role("textbox", name="Text to continue").fill(say("the end"))
    page.keyboard.press("Control+Enter")

    expect(page.locator(".message.assistant .text:visible")).to_have_text("the end")
    assert complaints == []


def test_tokens_of_server_are_those_of_the_answer(page: Page, complaints: list[str]) -> None:
    page.get_by_label("Show tokens").check()
    ask(page, say("Grüße, matey!"))

    tokens = page.locator(".token-list .token").all_text_contents()
    assert "".join(tokens).startswith("Grüße, matey!")
    assert len(tokens) > 3
    # The character ü has two tokens.
    page.locator(".token-list").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".token-details code").first).to_have_text("\\xc3")

    page.get_by_text("Completion", exact=True).click()
    page.get_by_label("Also of the given text").check()
    page.get_by_role("textbox", name="Text to continue").fill("The given text")
    page.get_by_label("Max tokens").fill("1")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user")).to_contain_text("The given text")
    expect(page.locator("#play-status")).to_have_text("The answer is complete.")
    first = page.locator(".token-list .token").first
    first.click()
    expect(page.locator(".token-details")).to_contain_text("no probability")
    shown = "".join(page.locator(".token-list .token").all_text_contents())
    assert shown.startswith("The given text")
    assert complaints == []


def test_model_is_selected_by_address(server: RealServer, page: Page) -> None:
    page.goto(f"{server.url}/playground?model={SECOND}")
    expect(page.get_by_label("Model", exact=True)).to_have_value(SECOND)

    page.goto(f"{server.url}/playground?model=tinker://a/sampler_weights/b")
    expect(page.get_by_label("Model: path or alias", exact=True)).to_have_value(
        "tinker://a/sampler_weights/b"
    )


def test_alias_is_offered_and_used(server: RealServer, page: Page) -> None:
    path = "tinker://a/sampler_weights/b"
    models = [
        {"id": FIRST, "root": FIRST, "parent": None},
        {"id": path, "root": path, "parent": FIRST},
        {"id": "my-pirate", "root": path, "parent": FIRST},
    ]
    page.route("**/v1/models?*", lambda route: route.fulfill(json={"data": models}))
    page.goto(f"{server.url}/playground?model=my-pirate")
    expect(page.get_by_label("Model", exact=True)).to_have_value("my-pirate")
    expect(page.locator("#play-model-1 optgroup[label=Aliases] option")).to_have_text(["my-pirate"])

    requests = answer_with(page, STREAM + "data: [DONE]\n\n")
    ask(page, "Hello")
    assert requests[0]["model"] == "my-pirate"
    # The native client samples from a path.
    page.get_by_text("Show as code").click()
    expect(page.locator("#play-code")).to_contain_text(f'model_path="{path}"')


# --- streams, as section 4 of the OpenAI protocol frames them ------------------------------------


def event(**choice: object) -> str:
    chunk = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
    return f"data: {json.dumps(chunk)}\n\n"


def entry(token: str, logprob: float, *others: tuple[str, float]) -> dict[str, object]:
    top = [{"token": each, "logprob": number} for each, number in ((token, logprob), *others)]
    return {"token": token, "logprob": logprob, "top_logprobs": top}


STREAM = (
    event(delta={"role": "assistant", "content": ""}, finish_reason=None)
    + ": keep-alive\n\n"
    + event(delta={"reasoning_content": "hm"}, finish_reason=None)
    + event(
        delta={"content": "Grüße"},
        logprobs={"content": [entry("Gr", -0.01), entry("üße", -3.0, ("oß", -0.5))]},
        finish_reason=None,
    )
    + event(delta={}, finish_reason="length")
    + 'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
)


def answer_with(page: Page, body: str) -> list[dict[str, object]]:
    """Answer requests of the page with a stream; returns their bodies."""
    requests: list[dict[str, object]] = []

    def fulfill(route: Route) -> None:
        requests.append(route.request.post_data_json)
        route.fulfill(body=body, content_type="text/event-stream; charset=utf-8")

    page.route("**/v1/chat/completions", fulfill)
    return requests


def test_tokens_show_probabilities(page: Page, complaints: list[str]) -> None:
    requests = answer_with(page, STREAM + "data: [DONE]\n\n")
    page.get_by_label("Show tokens").check()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Stop texts").fill("END\n\\n\\n")
    ask(page, "Hello")

    assert requests[0]["stream"] is True
    assert requests[0]["stream_options"] == {"include_usage": True}
    assert (requests[0]["logprobs"], requests[0]["top_logprobs"]) == (True, 5)
    assert (requests[0]["temperature"], requests[0]["stop"]) == (0.5, ["END", "\n\n"])
    assert "top_p" not in requests[0]
    tokens = page.locator(".token-list .token")
    expect(tokens).to_have_text(["Gr", "üße"])
    expect(tokens.first).to_have_class(re.compile("level-0"))
    expect(tokens.last).to_have_class(re.compile("level-4"))
    expect(page.locator(".message.assistant .note")).to_contain_text("ended at the token limit")
    expect(page.get_by_text("Reasoning")).to_be_visible()

    # One tab stop; the arrow keys move, and the details are text.
    page.locator(".token-list").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    details = page.locator(".token-details")
    expect(details).to_contain_text("4.98 %")
    expect(details.locator("li")).to_have_count(2)
    expect(details.locator("li").last).to_contain_text("60.65 %")
    tokens.first.hover()
    expect(details).to_contain_text("99.00 %")
    assert complaints == []


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("", "The connection ended before the answer was complete."),
        ('data: {"error":{"message":"the worker was lost","type":"server_error"}}\n\n', "lost"),
    ],
    ids=["cut", "error event"],
)
def test_broken_stream_keeps_text_and_says_so(page: Page, ending: str, message: str) -> None:
    answer_with(page, STREAM + ending)
    page.get_by_role("textbox", name="Message").fill("Hello")
    page.keyboard.press("Enter")

    expect(page.get_by_role("alert")).to_contain_text(message)
    expect(page.locator(".message.assistant .text").last).to_have_text("Grüße")


# --- stop -----------------------------------------------------------------------------------


def num_open_jobs(server: RealServer) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(r"^tinkex_jobs_(?:waiting|running) (\S+)", text, re.M)))


def test_stop_cancels_request(tmp_path: Path, context: BrowserContext) -> None:
    server = start_server(tmp_path / "slow", {"models": MODELS, "fake_token_seconds": 0.05})
    try:
        page = context.new_page()
        page.goto(f"{server.url}/playground")
        page.get_by_label("Max tokens").fill("2000")
        page.get_by_role("textbox", name="Message").fill(say("word " * 1000))
        page.keyboard.press("Enter")
        answer = page.locator(".message.assistant .text").last
        # Tokens are shown while the answer is generated.
        expect(answer).to_contain_text("word word word")
        expect(page.locator("#play-status")).to_have_text("Answering…")
        assert num_open_jobs(server) == 1

        page.keyboard.press("Escape")

        expect(page.locator("#play-status")).to_have_text("Stopped.")
        expect(answer).to_contain_text("word word word")
        eventually(lambda: num_open_jobs(server) == 0, seconds=30)
    finally:
        server.stop()


# --- code -----------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["python", "openai", "curl"])
def test_shown_code_gives_the_same_answer(
    server: RealServer, page: Page, tmp_path: Path, language: str
) -> None:
    page.get_by_label("System prompt").fill("It's a \"test\" with 'quotes'\nand lines.")
    page.get_by_label("Stop texts").fill("NEVER")
    page.get_by_label("Top k").fill("5")
    page.get_by_role("textbox", name="Message").fill(say("The answer's here."))
    page.get_by_text("Show as code").click()
    page.locator("#play-language").select_option(language)
    code = page.locator("#play-code").text_content() or ""
    assert server.key not in page.content()
    file = tmp_path / "code"
    file.write_text(code.replace("tml-...", server.key))

    command = ["sh" if language == "curl" else sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    assert "The answer's here." in done.stdout
