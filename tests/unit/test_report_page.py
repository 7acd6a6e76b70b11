"""The page: self-contained and safe, says what the report says, and stays small for the largest jobs."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from eventmaker import Job
from test_report import healthy, hostile, report_of, sick

from sdcrun.report import build, picture
from sdcrun.report.render import html

VOID = {"meta", "rect", "path", "line", "br", "img", "link", "i"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; complains about tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def page_of(job):
    state = build.fold(job.config, job.events)
    return html.render(build.build(state), state)


@pytest.mark.parametrize("job", [healthy(), sick(), hostile(), Job()], ids=["healthy", "sick", "hostile", "empty"])
def test_the_page_is_whole_and_reaches_for_nothing(job):
    text = page_of(job)
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object", "form"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "href", "xlink:href"), name
        assert "url(" not in (value or "")
    assert "http://" not in text and "https://" not in text
    assert "default-src 'none'" in text


def test_hostile_names_are_shown_and_never_taken_for_markup():
    text = page_of(hostile())
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    text.encode("utf-8")


def test_the_page_answers_an_operators_questions():
    text = " ".join(" ".join(Page(page_of(sick())).texts).split())
    for part in (
        "Confirmed: rank 1 (gpu-1, GPU-0001)", "serial S1", "UNGUARDED", "rank 3",
        "checkpoint Newest safe one: ck4.pt, of step 4.",
        "Take the device out of service", "flipped: bit 30 of the word", "unseen by design", "tainted",
        "sdcrun report job --commands", "attempt 0, 20 steps", "inside an all-reduce", "approved by Ada",
    ):  # fmt: skip
        assert part in text, part
    assert "No corruption was found in 100 steps" in page_of(healthy())


def test_bits_are_drawn_where_they_differ():
    drawing = picture.bits({"dtype": "float32", "expected": "0x3f800000", "observed": "0x7f800001"})
    assert drawing["flipped"] == [1, 31] and drawing["rows"][0]["bits"] == f"{0x3F800000:032b}"
    assert [field[0] for field in drawing["fields"]] == ["±", "exponent", "fraction"]
    for pair in ((None, None), ("finite", "nan"), ("0x12", None), ("0xzz", "0x1"), ("0x123456789", "0x1")):
        assert picture.bits(dict(zip(("expected", "observed"), pair, strict=True))) is None


def test_the_map_shows_each_rank_once_where_its_device_is_now():
    job = Job()
    job.hello(skip=(3,))
    job.vote(3, {"w": [2]})
    job.hello(attempt=1, shift=1)
    state = build.fold(job.config, job.events)
    nodes = picture.nodes(report_of(job), state)
    assert sorted(rank["rank"] for node in nodes for rank in node["ranks"]) == [0, 1, 2, 3]
    assert {rank["rank"]: rank["kind"] for node in nodes for rank in node["ranks"]} == {
        0: "clean", 1: "suspect", 2: "clean", 3: "clean"}  # fmt: skip


def test_the_time_line_holds_every_attempt_and_the_gravest_of_each_bin():
    job = Job()
    job.hello()
    job.summaries(5000)
    job.nonfinite(10, {0: ["w"], 1: ["w"]})
    job.vote(11, {"w": [2]})
    job.hello(attempt=1)
    job.audit(4999, attempt=1)
    time = picture.timeline(report_of(job), build.fold(job.config, job.events))
    lanes = {lane["name"]: lane["marks"] for lane in time["lanes"]}
    assert [mark["kind"] for mark in lanes["findings"]] == ["suspect"] and "2 more" not in lanes["findings"][0]["text"]
    assert [(a["number"], a["steps"]) for a in time["attempts"]] == [(0, 5000), (1, 5000)]
    assert lanes["audits"][0]["at"] == time["bins"] - 1


def big():
    """16,384 ranks and more than ten thousand findings' events, with long names."""
    job = Job(world=16384)
    job.hello()
    for step in range(1, 3500):
        job.vote(step, {f"module.layers.{step}.attention.query_key_value.weight" * 2: [step % 97 + 1]})
    job.summaries(4000)
    return job


def test_the_largest_page_stays_under_five_megabytes():
    text = page_of(big())
    assert len(text.encode()) < 5_000_000
    Page(text)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("make", [sick, hostile], ids=["sick", "hostile"])
def test_the_page_does_not_overflow_in_a_browser(tmp_path, width, make):
    # The page holds no script; a probe is added to a copy, with the policy that forbids it taken out.
    text = page_of(make())
    text = re.sub(r"<meta http-equiv=.Content-Security-Policy.*?>", "", text)
    probe = (
        "<script>const e=document.documentElement;document.title=JSON.stringify([e.scrollWidth,innerWidth]);"
        "document.body.textContent='PROBE '+document.title+' END';</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"{probe}</body>"))
    shown = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
         f"--window-size={width},900", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    scroll, inner = map(int, re.search(r"PROBE \[(\d+),(\d+)\] END", shown.stdout).groups())
    assert scroll <= inner
