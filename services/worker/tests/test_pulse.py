"""What a worker still has to tell while the API is away: in order, bounded, and honest about what was left out."""

from aerie_worker import pulse
from aerie_worker.pulse import News
from eagle3_core.jobs.wire import LogLine, Metric, Progress


def line(text: str) -> LogLine:
    return LogLine(at=0, text=text)


def filled(*texts: str) -> News:
    news = News()
    for text in texts:
        news.add_line(line(text))
    return news


def test_what_was_taken_is_told_once():
    news = filled("a")

    assert [told.text for told in news.take().logs] == ["a"]
    assert not news


def test_a_beat_that_was_not_delivered_goes_before_what_happened_since():
    news = filled("a", "b")
    news.metrics.append(Metric(name="loss", value=1, step=1))
    news.progress = Progress(done=1, total=9)
    beat = news.take()
    news.add_line(line("c"))
    news.metrics.append(Metric(name="loss", value=2, step=2))
    news.progress = Progress(done=2, total=9)

    news.put_back(beat)

    again = news.take()
    assert [told.text for told in again.logs] == ["a", "b", "c"]
    assert [metric.step for metric in again.metrics] == [1, 2]
    assert again.progress.done == 2


def test_of_a_flood_the_newest_lines_stay_and_the_loss_is_said(monkeypatch):
    monkeypatch.setattr(pulse, "MOST_LINES", 3)
    news = filled("1", "2", "3", "4", "5")

    assert [told.text for told in news.take().logs] == ["2 lines left out here", "3", "4", "5"]


def test_a_long_outage_does_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr(pulse, "MOST_LINES", 3)
    news = filled("1", "2", "3")

    for text in "4567":
        beat = news.take()
        news.add_line(line(text))
        news.put_back(beat)

    assert len(news.lines) == 3
    assert news.lines[-1].text == "7"
