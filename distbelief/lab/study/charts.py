"""Charts of a report as data and layouts for plotly.js: pure functions of its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from distbelief.core.records import Json
from distbelief.lab.study.claims import FIGURES
from distbelief.lab.study.definition import Target
from distbelief.lab.study.figures import HOW, ArmFigures, Report, highest, named, scaled, without_replicas
from distbelief.lab.study.trials import Point, Trial
from distbelief.record.summary import PARTS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f", "#a6761d", "#1b9e77")
"""Colours that colour-blind readers can tell apart too (Okabe and Ito 2008), except the last two."""
SYMBOLS = {"local": "circle", "simulated": "diamond-open"}
DASHES = {"local": "solid", "simulated": "dot"}
HEIGHT = 450
DIGITS = 3
LINED = "lines+markers"
MARKED = 10
"""Most points of a curve with marks, as browsers draw thousands of marks slowly."""
Chart = Json


def charts(report: Report) -> Iterator[tuple[str, str, Chart]]:
    """Yield name, heading and chart of all that have something to show."""
    curves = [trial for trial in report.trials if trial.points]
    if curves:
        yield (
            "accuracy",
            "Accuracy on the test set",
            _curves(report, curves, lambda point: math.nan if point.accuracy is None else point.accuracy, "accuracy"),
        )
        yield "loss", "Loss on the test set", _curves(report, curves, lambda point: point.loss, "loss")
    for target in report.study.targets:
        yield f"target-{target}", f"Time to {named(target)}, every seed", _times(report, target)
    if groups := list(scaled(report.arms)):
        yield "scaling", "Speed-up and efficiency against the number of replicas", _scaling(report, groups)
    if any(arm.parts for arm in report.arms):
        yield "parts", "Parts of a step", _parts(report)
    if any(arm.bytes_per_step for arm in report.arms):
        yield "bytes", "Bytes that a step moves", _bars(report, lambda arm: arm.bytes_per_step / 1e6, "MB a step")
    for number, of in enumerate(dict.fromkeys(claim.of for claim in report.study.claims)):
        if any(math.isfinite(FIGURES[of](arm)) for arm in report.arms):
            yield f"claimed-{number}", f"Figure of a claim: {of}", _bars(report, FIGURES[of], of)
    if stale := [arm for arm in report.arms if arm.most_staleness > 0]:
        yield "staleness", "Staleness of gradients", _staleness(report, stale)
    if held := next((target for target in reversed(report.study.targets) if _points(report, target)), None):
        yield "efficiency", f"Factors of the time to {named(held)}", _efficiency(report, held)


def _colour(report: Report, name: str) -> str:
    return COLOURS[[arm.name for arm in report.arms].index(name) % len(COLOURS)]


def _layout(x: str, y: str, **more: object) -> Chart:
    axes = {"xaxis": {"title": {"text": x}, "automargin": True}, "yaxis": {"title": {"text": y}, "automargin": True}}
    beside = {"legend": {"orientation": "h", "y": -0.25}, "margin": {"t": 30, "r": 10, "l": 10, "b": 10}}
    return {**axes, **beside, "height": HEIGHT, **more}


def _rows(x: str, arms: Sequence[ArmFigures], **more: object) -> Chart:
    axis = {"type": "category", "categoryarray": [arm.name for arm in reversed(arms)], "automargin": True}
    return {**_layout(x, "", height=120 + 26 * len(arms), **more), "yaxis": axis}


def _curves(report: Report, trials: Sequence[Trial], of: Callable[[Point], float], named: str) -> Chart:
    """Draw a line for each trial in its arm's colour, against time, epochs or samples."""
    by = {
        name: [[round(getattr(point, name), DIGITS) for point in trial.points] for trial in trials]
        for name in ("seconds", "epochs", "samples")
    }
    data, seen = [], set[str]()
    for trial, seconds in zip(trials, by["seconds"], strict=True):
        mode = LINED if len(trial.points) <= MARKED else "lines"
        line = {"color": _colour(report, trial.arm), "width": 1.2, "dash": DASHES[trial.place]}
        named_as = {"legendgroup": trial.arm, "showlegend": trial.arm not in seen}
        hover = f"%{{x}}: %{{y}}<extra>{trial.arm}, seed {trial.seed}</extra>"
        values = [round(of(point), 5) for point in trial.points]
        looks = {"line": line, "marker": {"size": 3}, "hovertemplate": hover, **named_as}
        data.append(_series(trial.arm, seconds, values, mode, **looks))
        seen.add(trial.arm)
    buttons = [_button(f"against {name}", {"x": xs}, {"xaxis.title.text": name}) for name, xs in by.items()]
    return {"data": data, "layout": _layout("seconds", named, updatemenus=[_menu(buttons)])}


def _times(report: Report, target: Target) -> Chart:
    data, notes = [], []
    for arm in report.arms:
        at = arm.at(target)
        there = [round(value, DIGITS) for value in at.seconds if math.isfinite(value)]
        marker = {"color": _colour(report, arm.name), "symbol": SYMBOLS[arm.place], "size": 8, "opacity": 0.7}
        data.append(_series(arm.name, there, [arm.name] * len(there), marker=marker, showlegend=False))
        if math.isfinite(at.median):
            marker = {"symbol": "line-ns-open", "size": 18, "color": marker["color"], "line": {"width": 2}}
            data.append(_series(f"{arm.name}, median", [at.median], [arm.name], marker=marker, showlegend=False))
        where = {"x": 1, "xref": "paper", "xanchor": "right", "y": arm.name, "showarrow": False}
        notes.append({**where, "text": f"{at.reached} of {at.of}"})
    layout = _rows("seconds", report.arms, annotations=notes)
    return {"data": data, "layout": {**layout, "xaxis": {**layout["xaxis"], "type": "log"}}}


def _scaling(report: Report, groups: Sequence[Sequence[ArmFigures]]) -> Chart:
    """Draw speed and time to target of several replicas over those of one, and the efficiency."""
    data: list[Chart] = []
    most = max(arm.replicas for group in groups for arm in group)
    line: list[float | None] = [1, most]
    by: dict[str, list[list[float | None]]] = {"samples a second": [], "share of the ideal": [], "time to target": []}
    for number, arms in enumerate(groups):
        place, replicas = arms[0].place, [arm.replicas for arm in arms]
        rates, times = [arm.samples_per_second for arm in arms], _seconds(report, arms)
        alone = rates[0] / replicas[0]
        several = [_ratio(rate, alone) for rate in rates]
        by["samples a second"].append(several)
        by["share of the ideal"].append([_ratio(rate, n * alone) for rate, n in zip(rates, replicas, strict=True)])
        by["time to target"].append([_ratio(times[0] * replicas[0], seconds) for seconds in times])
        drawn = {"dash": DASHES[place], "color": COLOURS[number % len(COLOURS)]}
        marker = {"symbol": SYMBOLS[place], "size": 9}
        name = f"{without_replicas(arms[0].name)} ({HOW[place]})"
        data.append(_series(name, replicas, several, LINED, line=drawn, marker=marker))
    data.append(_series("ideal", line, line, "lines", line={"dash": "dash", "color": "#999"}))
    titles = (
        "samples a second over those of one",
        "efficiency: speed-up over replicas",
        "speed-up in time to the target",
    )
    buttons = [
        _button(name, {"y": [*ys, [1, 1] if name == "share of the ideal" else line]}, {"yaxis.title.text": title})
        for (name, ys), title in zip(by.items(), titles, strict=True)
    ]
    return {"data": data, "layout": _layout("replicas", titles[0], updatemenus=[_menu(buttons)])}


def _seconds(report: Report, arms: Sequence[ArmFigures]) -> list[float]:
    target = highest(report.study.targets, arms)
    return [math.nan if target is None else arm.at(target).median for arm in arms]


def _ratio(value: float, of: float) -> float | None:
    """Return a rounded ratio; None (as in JSON) if a number is unknown or infinite."""
    return round(value / of, 3) if math.isfinite(value) and math.isfinite(of) and of else None


def _series(name: str, x: Sequence[object], y: Sequence[object], mode: str = "markers", **looks: object) -> Chart:
    return {"x": x, "y": y, "mode": mode, "name": name, **looks}


def _bar(arms: Sequence[ArmFigures], values: Sequence[float], colours: object, **more: object) -> Chart:
    bar = {"type": "bar", "orientation": "h", "y": [arm.name for arm in arms]}
    return {**bar, "x": values, "marker": {"color": colours}, **more}


def _button(label: str, data: Chart, layout: Chart) -> Chart:
    return {"label": label, "method": "update", "args": [data, layout]}


def _menu(buttons: Sequence[Chart]) -> Chart:
    return {"buttons": buttons, "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.15}


def _parts(report: Report) -> Chart:
    arms = [arm for arm in report.arms if arm.parts]
    data = [
        _bar(arms, [round(1e3 * arm.parts.get(part, 0.0), 4) for arm in arms], COLOURS[number], name=part)
        for number, part in enumerate(PARTS)
    ]
    return {"data": data, "layout": _rows("milliseconds a step", arms, barmode="stack")}


def _bars(report: Report, of: Callable[[ArmFigures], float], x: str) -> Chart:
    arms = [arm for arm in report.arms if math.isfinite(of(arm))]
    values, colours = [round(of(arm), 5) for arm in arms], [_colour(report, arm.name) for arm in arms]
    return {"data": [_bar(arms, values, colours)], "layout": _rows(x, arms)}


def _staleness(report: Report, arms: Sequence[ArmFigures]) -> Chart:
    """Draw the share of pushes of each staleness, over all trials of an arm."""
    data = []
    for arm in arms:
        counts = Counter[int]()
        for trial in report.trials:
            if trial.arm == arm.name:
                counts.update({int(age): count for age, count in trial.staleness.items()})
        ages, whole = sorted(counts), counts.total()
        parts = [round(counts[age] / whole, 6) for age in ages]
        line = {"color": _colour(report, arm.name), "dash": DASHES[arm.place]}
        data.append(_series(arm.name, ages, parts, LINED, line=line, marker={"size": 4}))
    return {"data": data, "layout": _layout("updates between the fetch and the push", "part of all pushes")}


def _points(report: Report, target: Target) -> list[ArmFigures]:
    return [arm for arm in report.arms if math.isfinite(arm.at(target).median)]


def _efficiency(report: Report, target: Target) -> Chart:
    """Draw steps to the target against seconds per step; lines to the lower right have equal time."""
    data = []
    for arm in _points(report, target):
        at = arm.at(target)
        hover = f"{arm.name}: {at.seconds_per_step * at.steps:.3g} s<extra></extra>"
        marker = {"size": 11, "symbol": SYMBOLS[arm.place], "color": _colour(report, arm.name)}
        step = round(1e3 * at.seconds_per_step, 5)
        data.append(_series(arm.name, [step], [at.steps], marker=marker, hovertemplate=hover))
    layout = _layout("milliseconds a step (hardware)", "steps to the target (statistical)")
    log = {name: {**layout[name], "type": "log"} for name in ("xaxis", "yaxis")}
    return {"data": data, "layout": {**layout, **log}}
