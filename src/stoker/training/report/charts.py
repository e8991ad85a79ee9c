"""Parts of a page: its style, tables, and lines and bars as SVG. It needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.base.files import atomic_file, check_target
from stoker.base.picture import Grid
from stoker.base.units import format_count

_POINTS = 400  # of a line
_DOTS = 40  # a line of fewer points shows each
_WIDE, _TALL, _EDGE = 460, 200, 62  # of a chart; left of its axis
_HUES = 145, 290, 50, 330, 175, 100, 255  # of further lines: the first are blue and orange
_BAR, _BESIDE = 230, 158  # longest bar; left of all bars

_STYLE = """
:root{--ink:#1d2733;--soft:#66727f;--line:#dfe4ea;--paper:#fff;--card:#f7f9fb;--a:#2563a8;--b:#c2561c}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf0;--soft:#9aa6b2;--line:#36414d;--paper:#14191f;--card:#1c232b;
--a:#6aa9ea;--b:#ec9257}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:70rem;margin:2rem auto;
padding:0 1.2rem;overflow-wrap:break-word}h1{font-size:1.6rem;margin:0}h2{font-size:1.15rem;margin:2.2rem 0 .6rem}
p{color:var(--soft);margin:.3rem 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.8rem;margin:1.2rem 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.7rem .9rem}
.tile b{display:block;font-size:1.35rem}.tile span{color:var(--soft);font-size:.85rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:1.2rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}.wide{overflow-x:auto}
th,td{padding:.22rem .7rem;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:600}
figure{margin:0}svg{width:100%;max-width:34rem;height:auto}svg text{fill:var(--soft);font-size:11px}
@media(max-width:30rem){svg text{font-size:13px}}svg .axis{stroke:var(--line)}
figcaption{color:var(--soft);font-size:.9rem}figcaption b{display:inline-block;margin:0 .5rem;font-weight:500}
caption{text-align:left;color:var(--soft);padding:.2rem .7rem}
"""

Points = Sequence[tuple[float, float]]


def _figure(title: str, tall: int, drawn: str, names: str = "") -> str:
    head = f'<figcaption>{escape(title)}{names}</figcaption><svg viewBox="0 0 {_WIDE} {tall}" role="img">'
    return f"<figure>{head}<title>{escape(title)}</title>{drawn}</svg></figure>"


def _number(value: float) -> str:
    return format_count(value) if abs(value) >= 10_000 else f"{value:.4g}"


def _text(x: float, y: float, words: str, side: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.0f}" text-anchor="{side}">{escape(words)}</text>'


def _thinned(points: Points) -> Points:
    step = -(-len(points) // _POINTS) or 1
    return [*points[::step], *([points[-1]] if (len(points) - 1) % step else [])]


def chart(curves: Mapping[str, Points], title: str, *, least: float | None = None) -> str:
    """Draw lines, with the ends of both axes, or one value; the lower end is at most ``least``. No points: no chart."""
    curves = {name: _thinned(points) for name, points in curves.items() if points}
    if not curves:
        return ""
    x, y = ([point[axis] for points in curves.values() for point in points] for axis in (0, 1))
    left, right, low, high = min(x), max(x), min([*y, *([] if least is None else [least])]), max(y)
    bottom, top, end = _TALL - 22, 8, _WIDE - 8

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - left) / (right - left) if right > left else 0.5
        up = (point[1] - low) / (high - low) if high > low else 0.5
        return _EDGE + across * (end - _EDGE), bottom - up * (bottom - top)

    names, drawn = "", [f'<path class="axis" d="M{_EDGE} {top}V{bottom}H{end}" fill="none"/>']
    for number, (name, points) in enumerate(curves.items()):
        colour = ("var(--a)", "var(--b)")[number] if number < 2 else f"hsl({_HUES[(number - 2) % len(_HUES)]} 60% 50%)"
        places = [at(point) for point in points]
        line = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if len(points) < _DOTS:
            drawn += [f'<circle cx="{across:.1f}" cy="{up:.1f}" r="2.5" fill="{colour}"/>' for across, up in places]
        if len(curves) > 1:
            names += f' <b style="color:{colour}">{escape(name)}</b>'
    drawn += [_text(_EDGE - 6, at((left, value))[1] + 4, _number(value), "end") for value in sorted({low, high})]
    for value, side in ({left: "start", right: "end"} if right > left else {left: "middle"}).items():
        drawn.append(_text(at((value, low))[0], _TALL - 6, f"{value:,.2f}".rstrip("0").rstrip("."), side))
    return _figure(title, _TALL, "".join(drawn), names)


def bars(values: Mapping[str, float], title: str) -> str:
    """Draw a bar for each value, the longest first."""
    found = sorted(values.items(), key=lambda each: -each[1])
    unit = _BAR / max([value for _, value in found] + [1e-12])
    drawn = [
        _text(_BESIDE - 8, 16 + 20 * n, name, "end")
        + f'<rect x="{_BESIDE}" y="{6 + 20 * n}" width="{unit * value:.1f}" height="13" rx="2" fill="var(--a)"/>'
        + _text(_BESIDE + 6 + unit * value, 16 + 20 * n, f"{value:.3g}" if value < 1000 else f"{value:,.0f}")
        for n, (name, value) in enumerate(found)
    ]
    return _figure(title, 4 + 20 * len(found), "".join(drawn))


def section(title: str, body: str) -> str:
    """Return a part of a page."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def grid(table: Grid) -> str:
    """Return a table, which scrolls if it is wider than the page."""
    return f'<div class="wide">{table.html()}</div>'


def check_page(out: str | Path) -> Path:
    """Return the file of a page, after a check that it can be written."""
    target = Path(out)
    if target.suffix != ".html":
        raise ConfigError(f"{target} does not end in .html. Choose for example {target.parent / 'report.html'}.")
    check_target(target)
    return target


def write_page(out: str | Path, title: str, body: str) -> None:
    """Write a page; an existing file is replaced."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    text = f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'
    with atomic_file(check_page(out)) as file:
        file.write(text.encode())
