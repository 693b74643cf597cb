"""One page from a run's files, whatever is in them."""

import xml.dom.minidom
from html.parser import HTMLParser

import numpy as np
import pytest

from shoal.runs import folder, manifest, page, report
from shoal.runs.metrics import RowWriter


class Page(HTMLParser):
    """Headings, text, and what the page would load from elsewhere; fails on tags that do not match."""

    def __init__(self, path):
        super().__init__()
        self.headings, self.text, self.sources, self.ids, self.open = [], "", [], [], []
        self.feed(path.read_text("utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.sources += [given[name] for name in ("src", "href", "xlink:href") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def make(root, agents=4, points=5, **changes):
    run = folder.create(root, "cartpole", "ppo")
    with RowWriter(run.metrics) as rows, RowWriter(run.eval) as evaluations:
        for point in range(1, points + 1):
            same = {"env_steps": 100 * point, "updates": point, "wall_s": 1.0, "agent": np.arange(agents)}
            returns = np.arange(agents) + 10.0 * point
            rows.write(same | {"return_mean": returns, "alive": np.ones(agents, bool)} | changes)
        evaluations.write(same | {"return_mean": returns, "episodes": 16})
    returns = returns.tolist()
    result = {
        "agents": agents,
        "return_mean": 487.25,
        "return_ci": [450, 499],
        "returns": returns,
        "total_s": 125,
    }
    manifest.write_toml(run.config, {"seed": 0, "env": "<cart&pole>"}, {"seed": "command line"})
    facts = manifest.collect(agents=agents, seed=0, finished=True, steps=500, result=result)
    manifest.write_json(run.manifest, facts | {"time_split": {"compile": 1, "train": 3.0, "other": 0}})
    return run


ALL = [
    *("Learning curve", "Final score of each agent", "Where the time went", "Method", "Settings"),
    *("Device and versions", "Reproduce"),
]


def test_a_finished_run_has_every_part_and_loads_nothing(tmp_path):
    run = make(tmp_path)
    page = Page(report.write_report(run))
    assert page.headings == ALL
    assert all(source.startswith("#") for source in page.sources)
    assert len(page.ids) == len(set(page.ids))
    for text in (
        "487.2",
        "450 – 499",
        "2 min 05 s",
        "env steps per agent",
        "Best: agent 3 with 53",
        "train",
        "75%",
    ):
        assert text in page.text
    assert 'env = "<cart&pole>"' in page.text  # shown, not interpreted
    assert "# command line" in page.text
    assert run.report.stat().st_size < 100_000


def test_plots_are_valid_and_follow_the_readers_theme(tmp_path):
    text = make_report(tmp_path).read_text("utf-8")
    plots = [part.split("</svg>")[0] for part in text.split("<svg")[1:]]
    assert len(plots) == 2
    for plot in plots:
        xml.dom.minidom.parseString(f"<svg{plot}</svg>")
        assert "var(--ink)" in plot
        assert not any(colour in plot for colour in page.THEME)


def make_report(root, **changes):
    return report.write_report(make(root, **changes))


def test_an_empty_folder_has_a_page(tmp_path):
    page = Page(report.write_report(folder.create(tmp_path, "cartpole", "ppo")))
    assert page.headings == []
    assert "has not finished" in page.text


def test_no_finished_episode(tmp_path):
    run = make(tmp_path, return_mean=np.nan)
    run.eval.unlink()
    manifest.write_json(run.manifest, {})
    page = Page(report.write_report(run))
    assert "No episode has finished yet" in page.text
    assert page.headings == ["Learning curve", "Settings"]


@pytest.mark.parametrize("agents", [1, 2, 500])
def test_any_number_of_agents(agents, tmp_path):
    assert Page(make_report(tmp_path, agents=agents)).headings == ALL


@pytest.mark.parametrize("points", [1, 2])
def test_a_single_point_is_drawn(points, tmp_path):
    assert "Learning curve" in Page(make_report(tmp_path, points=points)).headings


def test_diverged_agents_are_named_and_left_out_of_the_curve(tmp_path):
    run = make(tmp_path, alive=np.array([1, 1, 0, 1], bool), return_mean=np.array([1, 2, 1e30, np.nan]))
    facts = manifest.read_json(run.manifest)
    facts["result"]["returns"][2] = None
    manifest.write_json(run.manifest, facts)
    page = Page(report.write_report(run))
    assert "Diverged and frozen, 1 of 4: agent 2." in page.text
    assert "Without a score: 1." in page.text
    assert "e+30" not in page.text


def test_an_unfinished_run_shows_its_newest_evaluation(tmp_path):
    run = make(tmp_path)
    facts = manifest.read_json(run.manifest)
    manifest.write_json(run.manifest, {"started": facts["started"]})
    page = Page(report.write_report(run))
    assert "Final score of each agent" in page.headings
    assert "has not finished" in page.text


@pytest.mark.parametrize(
    ("name", "bytes_", "inline"), [("video.gif", 100, True), ("video.mp4", 3_000_001, False)]
)
def test_a_small_video_is_embedded_and_a_large_one_linked(name, bytes_, inline, tmp_path):
    run = make(tmp_path)
    (run.path / name).write_bytes(b"x" * bytes_)
    page = Page(report.write_report(run))
    assert "Trained agents" in page.headings
    source = next(source for source in page.sources if not source.startswith("#"))
    assert source.startswith("data:image/gif;base64,") if inline else source == name


def test_a_long_curve_is_thinned_without_losing_its_course():
    steps, agents = np.arange(10_000), np.arange(3)
    rows = {
        "env_steps": np.repeat(steps, 3),
        "agent": np.tile(agents, len(steps)),
        "return_mean": np.repeat(steps, 3) + 1000.0 * np.tile(agents, len(steps)),
    }
    rows["return_mean"][::7] = np.nan
    thin_steps, returns = report._curve(rows)
    assert returns.shape == (report.POINTS, 3)
    assert thin_steps[-1] == steps[-1]
    expected = thin_steps[:, None] + 1000.0 * agents
    np.testing.assert_allclose(returns, expected, atol=len(steps) / report.POINTS + 1)


def test_a_report_written_before_the_lock_is_freed_is_of_a_finished_run(tmp_path):
    run = make(tmp_path)
    with folder.lock(run):
        assert "still training" not in Page(report.write_report(run)).text
        manifest.write_json(run.manifest, {"finished": False})
        assert "still training" in Page(report.write_report(run)).text


def test_a_resumed_run_says_so_and_counts_all_its_steps(tmp_path):
    run = make(tmp_path)
    facts = manifest.read_json(run.manifest)
    facts["result"]["env_steps_per_agent"] = 1_250_000
    manifest.write_json(run.manifest, facts | {"resumed": [{"started": "2025-01-02", "updates": 79}]})
    page = Page(report.write_report(run))
    assert "2025-01-02, after 79 updates" in page.text
    assert "for 1,250,000 env steps each" in page.text
