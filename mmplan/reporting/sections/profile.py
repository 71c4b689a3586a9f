"""The profile: points and fitted curves with their breaks, residuals and spreads; links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmplan.costs.block_ranges import running_shares
from mmplan.costs.fit import fit_profile
from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup, plots
from mmplan.reporting.source import ReportData
from mmplan.schema.cluster import Link
from mmplan.schema.profile import Curve, Fits, ModuleProfile, Point, Profile

# Each picture weighs some 20 kB.
MOST_PICTURES = 60
# Points of a picture: a profile written by hand may have more.
_MOST_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A point of a curve: size, seconds of the whole module, half-width of its repeats.

    Attributes:
        scaled: measured on fewer blocks and scaled to the whole module by their work.
    """

    size: float
    value_s: float
    spread_s: float | None = None
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture: forward and backward of a module on one tp, or of a loss."""

    title: str
    axis: str
    forward: tuple[Curve, tuple[Sample, ...]]
    backward: tuple[Curve, tuple[Sample, ...]]


def profile_section(data: ReportData) -> str:
    """Fits as pictures and as a table; what links do."""
    profile = data.profile
    if profile is None:
        return markup.note(f"{data.profile_note} Fits cannot be shown without it.")
    note = markup.note(data.profile_note) if data.profile_note else ""
    panels = list(fit_panels(profile))
    pictures = "".join(
        _panel_picture(panel, profile.source, i) for i, panel in enumerate(panels[:MOST_PICTURES])
    )
    if len(panels) > MOST_PICTURES:
        left_out = len(panels) - MOST_PICTURES
        note += markup.note(f"{left_out} more fits are in the table below, without a picture.")
    return (
        markup.text("p", _LABELS[profile.source], class_=f"source {profile.source}")
        + note
        + _legend(panels)
        + markup.element("div", pictures, class_="grid")
        + _fit_table(panels, profile.source)
        + _links(profile)
    )


_LABELS = {
    "measured": "MEASURED: every time in this profile was measured on the cluster's devices.",
    "analytic": "ANALYTIC: no time in this profile was measured. FLOPs were counted and divided "
    "by what such a device is assumed to reach.",
    "given": "GIVEN: the times of this profile were written by hand or come from elsewhere.",
}


def fit_panels(profile: Profile) -> Iterator[Panel]:
    """Every fit of a profile with the points behind it, whole modules."""
    fits = profile.fits or fit_profile(profile)
    for key, module in _versions(profile, fits):
        for tp, fit in fits.modules[key].items():
            points = [point for point in module.points if str(point.tp) == tp]
            yield Panel(
                title=f"{key}, tp {tp}",
                axis="micro-batch (samples)",
                forward=(fit.forward, _samples(module, points, "forward")),
                backward=(fit.backward, _samples(module, points, "backward")),
            )
    for name, fit in fits.losses.items():
        loss = profile.losses[name].points if name in profile.losses else ()
        forward = tuple(Sample(size=p.samples, value_s=p.forward_s) for p in loss)
        backward = tuple(Sample(size=p.samples, value_s=p.backward_s) for p in loss)
        yield Panel(
            title=f"loss {name}",
            axis="samples",
            forward=(fit.forward, forward),
            backward=(fit.backward, backward),
        )


def _versions(profile: Profile, fits: Fits) -> Iterator[tuple[str, ModuleProfile]]:
    """Names of fits with the module profile they were made from."""
    known = {name: profile.module(name) for name in profile.modules}
    for task, changed in profile.tasks.items():
        known |= {f"{task}.{name}": profile.module(name, task) for name in changed}
    yield from ((key, known[key]) for key in fits.modules if key in known)


def _samples(module: ModuleProfile, points: Sequence[Point], direction: str) -> tuple[Sample, ...]:
    shares = running_shares(module.block_work, module.blocks)

    def sample(point: Point) -> Sample:
        blocks = point.blocks or module.blocks
        work_share = shares[blocks] or 1.0
        spread: float | None = getattr(point, f"{direction}_spread_s")
        return Sample(
            size=point.microbatch,
            value_s=getattr(point, f"{direction}_s") / work_share,
            spread_s=None if spread is None else spread / work_share,
            scaled=blocks != module.blocks,
        )

    return tuple(map(sample, points[:_MOST_POINTS]))


def _legend(panels: Sequence[Panel]) -> str:
    signs = [
        ('<span class="key dot kF"></span>', "forward: filled circles, solid curve"),
        ('<span class="key dot kB"></span>', "backward: filled squares, dashed curve"),
    ]
    every = [sample for panel in panels for sample in (*panel.forward[1], *panel.backward[1])]
    if any(sample.scaled for sample in every):
        signs.append(
            ('<span class="key dot open"></span>', "open: fewer blocks, scaled to the whole module")
        )
    if any(sample.spread_s for sample in every):
        signs.append(('<span class="key bar"></span>', "bar: middle half of the repeats"))
    if any(panel.forward[0].knots or panel.backward[0].knots for panel in panels):
        signs.append(('<span class="key dotted"></span>', "dotted: break between two pieces"))
    return markup.legend(signs)


def _panel_picture(panel: Panel, source: str, index: int) -> str:
    label = f"{panel.title}: {source} points and fitted curves"
    return plots.panel(
        lambda figure: _draw(figure, panel),
        title=panel.title,
        beside=markup.text("span", source, class_=f"tag {source}"),
        height=3.1,
        label=label,
        prefix=f"fit{index}",
    )


def _draw(figure: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    pairs = (panel.forward, panel.backward)
    values = [s.value_s for _, samples in pairs for s in samples]
    factor, unit = plots.time_unit(values)
    for (curve, samples), colour, marker, line in (
        (panel.forward, plots.BLUE, "o", "-"),
        (panel.backward, plots.RED, "s", "--"),
    ):
        _draw_curve(upper, curve, samples, factor, colour, line)
        _draw_points(upper, samples, factor, colour, marker)
        _draw_residuals(lower, curve, samples, colour, marker)
        for knot in curve.knots:
            upper.axvline(knot, color=colour, linestyle=":", linewidth=1)
    if _spans_decades(pairs):
        upper.set_xscale("log", base=2)
        upper.set_yscale("log")
        upper.set_ylim(min(values) * factor / 1.6, max(values) * factor * 1.6)
        upper.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plots.plain_numbers(upper.yaxis, lower.xaxis)
    else:
        upper.set_ylim(bottom=0)
    upper.set_ylabel(f"time ({unit})")
    lower.axhline(0, color=plots.DIM, linewidth=0.8)
    lower.set(xlabel=panel.axis, ylabel="error (%)")
    # A scale of less than a percent would blow rounding up to a finding.
    most = max(1.0, *(abs(value) for value in lower.dataLim.intervaly)) * 1.3
    lower.set_ylim(-most, most)


def _spans_decades(pairs: Sequence[tuple[Curve, tuple[Sample, ...]]]) -> bool:
    every = [s for _, samples in pairs for s in samples]
    if not every or min(s.value_s for s in every) <= 0:
        return False
    return max(s.size for s in every) >= 8 * min(s.size for s in every)


def _draw_curve(
    axes: Any, curve: Curve, samples: Sequence[Sample], factor: float, colour: str, line: str
) -> None:
    ends = [s.size for s in samples] or [curve.lowest, curve.highest]
    low, high = min(ends), max(ends)
    # Equal steps of the logarithm: the curve is bent on logarithmic axes.
    sizes = {low * (high / low) ** (i / 60) for i in range(61)} | {low, high}
    xs = sorted(sizes | {knot for knot in curve.knots if low < knot < high})
    axes.plot(xs, [curve.at(x) * factor for x in xs], color=colour, linestyle=line)


def _draw_points(
    axes: Any, samples: Sequence[Sample], factor: float, colour: str, marker: str
) -> None:
    for scaled in (False, True):
        chosen = [s for s in samples if s.scaled is scaled]
        if chosen:
            axes.errorbar(
                [s.size for s in chosen],
                [s.value_s * factor for s in chosen],
                yerr=[min(s.spread_s or 0.0, 0.999 * s.value_s) * factor for s in chosen],
                fmt=marker,
                color=colour,
                markersize=4,
                markerfacecolor=plots.GROUND if scaled else colour,
                elinewidth=1,
                capsize=2 if any(s.spread_s for s in chosen) else 0,
            )


def _draw_residuals(
    axes: Any, curve: Curve, samples: Sequence[Sample], colour: str, marker: str
) -> None:
    known = [s for s in samples if s.value_s > 0]
    axes.plot(
        [s.size for s in known],
        [100 * (curve.at(s.size) / s.value_s - 1) for s in known],
        linestyle="none",
        marker=marker,
        markersize=3,
        color=colour,
    )


def _fit_table(panels: Sequence[Panel], source: str) -> str:
    rows = [
        (
            panel.title,
            direction,
            source,
            fmt.seconds(curve.alpha),
            ", then ".join(fmt.seconds(slope) for slope in curve.slopes),
            ", ".join(f"{knot:g}" for knot in curve.knots) or "none",
            curve.points,
            fmt.percent(curve.residual_median),
            fmt.percent(curve.residual_p90),
        )
        for panel in panels
        for direction, curve in (("forward", panel.forward[0]), ("backward", panel.backward[0]))
    ]
    columns = (
        "what",
        "time",
        "times are",
        ">fixed",
        ">per sample",
        ">breaks at",
        ">points",
        ">residual, median",
        ">90th percentile",
    )
    grid = markup.table(columns, rows, label="Fitted curves")
    return markup.details("Fitted curves, as a table", grid)


def _links(profile: Profile) -> str:
    links = profile.cluster.links
    named: dict[str, Link | None] = {}
    for where, whose, link, collectives in (
        ("inside a node", "", links.intra_node, links.intra_node_collectives),
        ("between nodes", " (a node's)", links.inter_node, links.inter_node_collectives),
    ):
        named[f"{where}{whose}, point to point"] = link
        if collectives is not None:
            named[f"{where}, all-reduce"] = collectives.all_reduce
            named[f"{where}, all-gather"] = collectives.all_gather
    rows = [
        (
            name,
            fmt.seconds(link.latency_s),
            f"{fmt.size(link.bandwidth_bytes_per_s)}/s",
            profile.source,
        )
        for name, link in named.items()
        if link is not None
    ]
    columns = ("link", ">latency", ">bandwidth", "from a profile that is")
    return markup.text("h3", f"Links of {profile.cluster.name}") + markup.table(
        columns, rows, label="Links"
    )
