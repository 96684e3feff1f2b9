"""Report of a study: its figures and findings as JSON, CSV and one page that any browser opens without a network."""

from __future__ import annotations

import csv
import html
import importlib.resources
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distbelief.core.records import Json
from distbelief.lab.study.charts import charts
from distbelief.lab.study.claims import FIGURES, judge
from distbelief.lab.study.definition import Study
from distbelief.lab.study.figures import SHRUNK_HEAD, Report, figures, kind, shrunk_figures, tables
from distbelief.lab.study.running import MACHINE, cost_of, read_kept, starts
from distbelief.lab.study.sentences import diagnoses, findings, observe, sentences
from distbelief.lab.study.trials import Point, Trial
from distbelief.record.folder import write_atomically
from distbelief.record.summary import moved

REPORT, TRIALS, POINTS = "report.json", "trials.csv", "points.csv"


def make_report(study: Study, trials: Sequence[Trial], machine: Json, left: int | None = None) -> Report:
    """Make the report of a study's trials."""
    counted = [trial for trial in trials if not trial.tuning]
    whole = len(study.arms) * len(study.seeds) + sum(len(arm.grid) * len(study.tuning_seeds) for arm in study.arms)
    whole += len(starts(study))
    trained = [arm for arm in study.arms if not arm.compresses]
    names = {arm.name for arm in trained}
    measured = [figures(study, counted, arm) for arm in trained]
    shrunk = [shrunk_figures(counted, arm) for arm in study.arms if arm.compresses]
    left, kept = whole - len(trials) if left is None else left, [trial for trial in counted if trial.arm in names]
    beside = observe(study, counted)
    report = Report(
        study=study, machine=dict(machine), left=left, arms=measured, trials=kept, shrunk=shrunk, problems=beside
    )
    judged = [
        judge(claim, [FIGURES[claim.of](report.arm(name)) for name in claim.arms])
        for claim in (() if report.left else study.claims)
    ]
    told = [*findings(study, beside), *sentences(report), *diagnoses(report)]
    return msgspec.structs.replace(report, sentences=told, claims=judged)


def write_report(path: Path, study: Study, trials: Sequence[Trial]) -> Report:
    """Write the report of a study into its folder."""
    cost = cost_of(path)
    text = (
        f"The jobs took {cost.jobs:,.0f} s, evaluating afterwards {cost.measuring:,.0f} s, and the study itself "
        f"{cost.beside:,.1f} s, {100 * cost.beside / ((cost.jobs + cost.measuring) or 1.0):.1f} % of both."
    )
    report = msgspec.structs.replace(make_report(study, trials, read_kept(path / MACHINE, Json)), cost=text)
    write_atomically(path / REPORT, msgspec.json.format(msgspec.json.encode(report), indent=1))
    texts = ("arm", "seed", "value", "command", "place", "outcome", "reason", "replicas")
    kept = (*texts, "seconds", "epochs", "steps", "samples", "updates", "bytes", "busy")
    till = [(what, target) for target in study.targets for what in ("seconds", "epochs")]
    rows = [
        [
            *(getattr(trial, name) for name in kept),
            trial.accuracy,
            *(trial.bytes_by_kind.get(kind, 0) for kind in moved({})),
            *(trial.until(target, what) for what, target in till),
        ]
        for trial in report.trials
    ]
    heads = [*(f"bytes {kind}" for kind in moved({})), *(f"{what} to {target}" for what, target in till)]
    _write(path / TRIALS, [*kept, "accuracy", *heads], rows)
    points = [
        [trial.arm, trial.seed, *msgspec.structs.astuple(point)] for trial in report.trials for point in trial.points
    ]
    _write(path / POINTS, ["arm", "seed", *Point.__struct_fields__], points)
    return report


def _write(path: Path, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([head, *rows])
    write_atomically(path, text.getvalue().encode())


PAGE = "report.html"
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--soft:#f3f4f6;--line:#d0d7de;--grid:#e4e7eb}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--paper:#14171a;--soft:#1f2428;--line:#3a424a;--grid:#2c333a}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:1rem}h1{font-size:1.6rem;line-height:1.2}
h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}th,td{padding:.3rem .6rem;text-align:right;
border-bottom:1px solid var(--line);white-space:nowrap}th:first-child,td:first-child{text-align:left}
code{font-size:.8rem;overflow-wrap:anywhere}.chart{width:100%}details{background:var(--soft);
padding:.6rem;border-radius:6px;margin:.6rem 0}li{margin:.2rem 0}
"""
# plotly.js and each chart wait until a chart comes into view: all at once would block a large report for seconds
SCRIPT = """
const dark=matchMedia("(prefers-color-scheme:dark)");
const colours=()=>{const of=name=>getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const axis={gridcolor:of("--grid"),zerolinecolor:of("--line")};
return {paper_bgcolor:"rgba(0,0,0,0)",plot_bgcolor:"rgba(0,0,0,0)",font:{color:of("--ink")},
template:{layout:{xaxis:axis,yaxis:axis}}}};
const load=()=>{const script=document.createElement("script");script.text=document.getElementById("plotly").text;
document.head.append(script)};
const draw=name=>Plotly.react(name,CHARTS[name].data,Object.assign({},CHARTS[name].layout,colours()),
{responsive:true,displaylogo:false});
const drawn=new Set(),show=name=>{if(drawn.has(name))return;if(!drawn.size)load();drawn.add(name);draw(name)};
const seen=new IntersectionObserver(found=>{for(const one of found)if(one.isIntersecting)show(one.target.id)},
{rootMargin:"300px"});
for(const name in CHARTS)seen.observe(document.getElementById(name));
dark.addEventListener("change",()=>drawn.forEach(draw));
addEventListener("beforeprint",()=>Object.keys(CHARTS).forEach(show));
"""


def plotly() -> str:
    """Return the installed plotly's script, without importing plotly."""
    return importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_text()


def write_page(path: Path, report: Report) -> None:
    """Write the page of a report."""
    write_atomically(path, page(report, plotly()).encode())


def page(report: Report, script: str) -> str:
    """Return the page, with plotly.js in it."""
    drawn = list(charts(report))
    figures = msgspec.json.encode({name: chart for name, _, chart in drawn}).decode().replace("</", "<\\/")
    title, escape = html.escape(report.study.title), html.escape
    shrunk = [SHRUNK_HEAD, *(arm.row() for arm in report.shrunk)]
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'><link rel='icon' href='data:,'>",
        f"<style>{STYLE}</style></head><body><main><h1>{title}</h1><p>{escape(report.study.question)}</p>",
        "<h2>What was found</h2><ol>",
        *(f"<li>{escape(sentence)}</li>" for sentence in report.sentences),
        "</ol>",
        *(["<h2>What was expected</h2>"] if report.claims else []),
        *(f"<p>{escape(claim.line())}.</p>" for claim in report.claims),
        f"<p>{report.left} trials are still to be run.</p>" if report.left else "",
        "<h2>The arms</h2>",
        *(
            f"<h3>{escape(kind(group))}; speed-ups are over {escape(group[0].baseline)}</h3>"
            + "".join(map(_cells, tables(group, report.study.targets)))
            for group in report.groups()
        ),
        *(f"<h3>{escape(heading)}</h3>{_cells(rows)}" for heading, rows in report.problem_tables()),
        f"<h2>What became of their models</h2>{_cells(shrunk)}" if report.shrunk else "",
        "<details><summary>The command of each arm</summary><ul>",
        *(
            f"<li>{escape(arm.name)}<br><code>{escape(arm.command)}</code>{escape(arm.reason)}</li>"
            for arm in report.arms
            if arm.command
        ),
        "</ul></details>",
        # the height reserves space until a chart is drawn
        *(
            f"<h2>{escape(heading)}</h2><div class='chart' id='{name}' style='height:{chart['layout']['height']}px'>"
            "</div>"
            for name, heading, chart in drawn
        ),
        f"<h2>How it was made</h2>{_rules(report)}</main>",
        f"<script type='text/plain' id='plotly'>{script}</script>",
        f"<script>const CHARTS={figures};{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts)


def _cells(rows: Sequence[Sequence[str]]) -> str:
    [head, *body] = [[html.escape(cell) for cell in row] for row in rows]
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
    top = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<div class='wide'><table><thead><tr>{top}</tr></thead><tbody>{cells}</tbody></table></div>"


def _rules(report: Report) -> str:
    study = report.study
    rules = [
        f"Seeds: {', '.join(map(str, study.seeds))}, the same for all arms, which take turns.",
        "A target is reached at the first of two consecutive evaluations that meet it. A miss counts as infinite in "
        "the median. Intervals of ratios have a confidence of 95 % (percentile bootstrap).",
        "Models were measured after each run at its checkpoints, which cost the arms no time.",
        "An arm is compared only with a baseline of its own task, and a measured arm (circles, solid) never with a "
        "simulated one (diamonds, dotted).",
    ]
    if study.starts:
        start = study.starts[0]
        rules.append(
            f"All arms begin with the model that {start.strategy} {' '.join(start.words)} trained with the same seed; "
            "that training counts for none of them."
        )
    rules += [
        f"{arm.name}: {arm.members} models are trained one after another, and their outputs averaged; seconds, samples "
        "and steps are sums."
        for arm in study.arms
        if arm.members > 1
    ]
    rules += [report.cost] if report.cost else []
    if report.machine:
        rules.append(f"Machine: {', '.join(f'{name} {value}' for name, value in report.machine.items())}.")
    return f"<ul>{''.join(f'<li>{html.escape(rule)}</li>' for rule in rules)}</ul>"
