"""docs/acceptance.md and its plots, from the rows of acceptance.py. Measures nothing."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import kimi

ROOT = Path(__file__).parents[1]
NAMES = {"none": "plain", "ngram": "prompt look-up", "dflash": "DFlash"}
LOG = ROOT / "kdtree" / "demo" / "drafter" / "train_log.json"
WAYS = {  # of the log: what the candidates' scores are
    "plain": "log-probabilities",
    "sharpened": "sharpened, fitted at this T",
    "coupled at T": "coupled, fitted at this T",
    "law": "coupled, one fit for all T",
    "law + selector": "... with the selector (as shipped)",
    "law + bigram": "... with a bigram table",
    "law + both": "... with both",
}
TREE = "DFlash, tree, 7"
TEXT = (ROOT / "benchmarks" / "acceptance.md").read_text

Rows = list[dict]


def write(docs: Path, results: Path) -> None:
    """Fills the sections of benchmarks/acceptance.md with what `results` holds."""
    found = {}
    for device in ("cuda", "cpu"):
        path = results / f"acceptance_{device}.json"
        if path.exists():
            found[device] = json.loads(path.read_text())
    rows = one_of_each(each["rows"] for each in found.values())
    sections = {
        "runs": lines(machine(each) for each in found.values()),
        "acceptance": lines(acceptance(kind(rows, "acceptance") + kind(rows, "auto"))),
        "auto": lines(auto(kind(rows, "auto"))),
        "depth": lines(depth(kind(rows, "acceptance"))),
        "edges": lines(edges(json.loads(LOG.read_text())["judged"])),
        "without": lines(without(kind(rows, "parts"))),
        "speed": lines(line for each in found.values() for line in speed(each)),
        "paired": lines(paired(kind(rows, "paired"))),
        "experts": lines(experts(kind(rows, "experts"))),
        "int4": lines(int4(rows)),
        "projection": lines(projection(rows)),
    }
    plots(docs, rows)
    text = TEXT()
    for name, section in sections.items():
        text = text.replace(f"<!-- {name} -->", section)
    (docs / "acceptance.md").write_text(text)


def one_of_each(files: Iterable[Rows]) -> Rows:
    """Of each kind the rows of the first file that has it."""
    kept: dict[str, Rows] = {}
    for rows in files:
        for name in dict.fromkeys(row["kind"] for row in rows):
            kept.setdefault(name, kind(rows, name))
    return [row for rows in kept.values() for row in rows]


def kind(rows: Rows, name: str) -> Rows:
    return [row for row in rows if row["kind"] == name]


def lines(made: Iterable[str]) -> str:
    return "\n".join(made)


def table(names: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def machine(found: dict) -> str:
    return (
        f"- {found['card']}, torch {found['torch']}, {found['date'][:10]},"
        f" commit {found['commit']}, clocks {found['clocks'] or 'not known'}"
    )


def label(row: dict) -> str:
    name = NAMES.get(row["drafter"], row["drafter"].replace("dflash", "DFlash"))
    if row["drafter"] == "none":
        return name
    if "by" in row:
        return f"{name}, tree, auto by {row['by']}"
    tree = f"chain of {row['budget']}" if row["tree"] == "chain" else f"tree, {row['budget']}"
    return f"{name}, {tree}"


def categories(rows: Rows) -> list[tuple[str, float]]:
    return list(dict.fromkeys((row["category"], row["temperature"]) for row in rows))


def acceptance(rows: Rows) -> Iterator[str]:
    """Tokens a round by drafter, a column a category and temperature."""
    columns = sorted(categories(rows), key=lambda each: each[1])
    by = {(label(r), (r["category"], r["temperature"])): r for r in rows if "," not in r["drafter"]}
    names = list(dict.fromkeys(name for name, _ in by))
    names = [name for name in names if all((name, column) in by for column in columns)]
    body = []
    for name in names:
        found = [by[name, column] for column in columns]
        body.append([name, *(f"{r['acceptance_length']:.2f} ± {r['error']:.2f}" for r in found)])
    plain, tree = ([by[name, column] for column in columns] for name in ("plain", TREE))
    body.append(["distinct 4-grams", *(f"{row['distinct_4']:.3f}" for row in plain)])
    body.append(["texts that loop", *(f"{row['looping']:.1%}" for row in plain)])
    alone = [f"{v:.2f}" if (v := row["not_looping"]) is not None else "" for row in tree]
    body.append([f"{TREE}, of those that do not", *alone])
    yield from table(["", *(f"{category}, T={t:g}" for category, t in columns)], body)


def depth(rows: Rows) -> Iterator[str]:
    """Share of the rounds that accept a node of each depth, of those that offer one."""
    mains = [r for r in rows if r["drafter"] == "dflash" and r["budget"] in (7, 63)]
    deepest = max(len(row["offered"]) for row in mains)
    body = []
    for row in mains:
        rates = [a / n if n else 0.0 for a, n in zip(row["accepted"], row["offered"], strict=True)]
        cells = [f"{rate:.2f}" for rate in rates] + [""] * (deepest - len(rates))
        body.append([f"{row['category']}, T={row['temperature']:g}", label(row), *cells])
    yield from table(["", "", *(str(d + 1) for d in range(deepest))], body)


def without(rows: Rows) -> Iterator[str]:
    """Trees of 7 with one part taken away, or other edges."""
    kept = [row for row in rows if row["drafter"].startswith("dflash")]
    columns = sorted(categories(kept), key=lambda each: each[1])
    by = {(r["drafter"], r["category"], r["temperature"]): r["acceptance_length"] for r in kept}
    body = []
    for name in dict.fromkeys(row["drafter"] for row in kept):
        cells = [f"{v:.2f}" if (v := by.get((name, *c))) else "" for c in columns]
        body.append([name.replace("dflash", "DFlash"), *cells])
    yield from table(["tree of 7", *(f"{c}, T={t:g}" for c, t in columns)], body)


def auto(rows: Rows) -> Iterator[str]:
    """What the automatic budget chose, and what that is worth by its own table."""
    body = []
    for row in rows:
        rounds = sum(row["chosen"].values())
        shares = {"1": rounds - row["drafts"]} | {
            size: n for size, n in row["chosen"].items() if size != "1"
        }
        told = ", ".join(f"{size}: {n / rounds:.0%}" for size, n in shares.items() if n)
        body.append(
            [
                row["by"],
                f"{row['category']}, T={row['temperature']:g}",
                f"{row['acceptance_length']:.2f}",
                f"{row['speedup']:.2f}",
                told,
            ]
        )
    yield from table(["costs of", "", "tokens a round", "gain", "rounds by N"], body)


def edges(judged: dict) -> Iterator[str]:
    """The training's own figures, of each part alone and together."""
    sizes = ("chain", "tree 7", "tree 15", "tree 31", "tree 63")
    body = []
    for name, figures in judged.items():
        for way, told in WAYS.items():
            if way in figures:
                body.append([name, told, *(f"{figures[way][size]:.2f}" for size in sizes)])
    yield from table(["", "", "chain of 7", *sizes[1:]], body)


def speed(found: dict) -> Iterator[str]:
    yield f"{found['card']}:\n"
    body = []
    for row in kind(found["rows"], "speed"):
        phases = ", ".join(f"{name} {ms:.2f}" for name, ms in row["phases_ms"].items())
        body.append(
            [
                f"{row['category']}, T={row['temperature']:g}",
                label(row),
                f"{row['acceptance_length']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['speedup']:.2f}",
                f"{row['ms_per_round']:.2f}",
                phases,
            ]
        )
    heads = ["", "", "tokens a round", "tokens/s", "speed-up", "ms a round", "of which"]
    yield from table(heads, body)
    yield ""


def paired(rows: Rows) -> Iterator[str]:
    """Gains over plain decoding round by round, and the automatic budget's over the better."""
    by = {(category, t): [] for category, t in categories(rows)}
    for row in rows:
        gain = f"{row['speedup']:.2f} ± {row['error']:.2f} ({row['acceptance_length']:.2f})"
        by[row["category"], row["temperature"]].append(gain)
        if row["budget"] == "auto":
            over = f"{row['over_better']:.2f} ± {row['over_better_error']:.2f}"
            by[row["category"], row["temperature"]].append(over)
    heads = list(dict.fromkeys(map(label, rows)))
    body = ([f"{category}, T={t:g}", *cells] for (category, t), cells in by.items())
    yield from table(["", *heads, "auto over the better"], body)


def experts(rows: Rows) -> Iterator[str]:
    by = {(row["category"], row["N"]): row for row in rows}
    names = list(dict.fromkeys(row["category"] for row in rows))
    body = []
    for nodes in dict.fromkeys(row["N"] for row in rows):
        uniform = by[names[0], nodes]["uniform"]
        cells = [f"{(d := by[name, nodes]['distinct']):.1f} ({d / uniform:.2f})" for name in names]
        body.append([str(nodes), f"{uniform:.1f}", *cells])
    yield from table(["N", "uniform", *names], body)


def int4(rows: Rows) -> Iterator[str]:
    body, edges = [], [row["margin"] for row in kind(rows, "int4")]
    for row, high in zip(kind(rows, "int4"), [*edges[1:], None], strict=True):
        span = f"{row['margin']:g} to {high:g}" if high else f"over {row['margin']:g}"
        share = row["flips"] / row["positions"] if row["positions"] else 0.0
        body.append([span, str(row["positions"]), f"{share:.2%}"])
    yield from table(["margin, nats", "positions", "greedy token changes"], body)
    for row in kind(rows, "int4_acceptance"):
        yield (
            f"\nTokens a round of the tree of 7 at T = 0: {row['bfloat16']:.2f} before,"
            f" {row['int4']:.2f} after."
        )


def projection(rows: Rows) -> Iterator[str]:
    """Kimi-K2.6 on 8 H200: floors of `plan`, acceptance lengths of the demo pair."""
    of = kind(rows, "acceptance") + kind(rows, "auto")
    kept = [r for r in of if r["drafter"] == "dflash" and r["category"] in ("code", "prose")]
    auto = [r for r in kept if r["kind"] == "auto" and r["by"] == kimi.NAME]
    kept = [r for r in kept if r["kind"] == "acceptance"]
    costs = kimi.costs(sorted({1, *(row["budget"] + 1 for row in kept)}))
    ms = {size: 1e3 * seconds for size, seconds in costs.rounds.items()}
    draft = 1e3 * costs.draft
    body = [["plain", "1", f"{ms[1]:.2f}", "", *[f"{1e3 / ms[1]:.0f} (1.00)"] * 2]]
    for tree, budget in dict.fromkeys((row["tree"], row["budget"]) for row in kept):
        of = [r for r in kept if (r["tree"], r["budget"]) == (tree, budget)]
        whole = ms[budget + 1] + draft
        cells = []
        for t in (0, 1):
            lengths = [row["acceptance_length"] for row in of if row["temperature"] == t]
            rate = 1e3 * sum(lengths) / max(1, len(lengths)) / whole
            cells.append(f"{rate:.0f} ({rate * ms[1] / 1e3:.2f})")
        body.append(
            [label(of[0]), str(budget + 1), f"{ms[budget + 1]:.2f}", f"{draft:.2f}", *cells]
        )
    cells = []
    for t in (0, 1):
        gains = [row["speedup"] for row in auto if row["temperature"] == t]
        gain = sum(gains) / max(1, len(gains))
        cells.append(f"{1e3 / ms[1] * gain:.0f} ({gain:.2f})")
    body.append(["DFlash, tree, auto", "any", "", f"{draft:.2f}", *cells])
    heads = ["", "N", "verify, ms", "draft, ms", "tokens/s, T=0", "tokens/s, T=1"]
    yield from table(heads, body)


def plots(docs: Path, rows: Rows) -> None:
    import matplotlib  # only to report: where one measures it may be missing

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "kdtree"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    kept = [r for r in kind(rows, "acceptance") if r["drafter"] == "dflash"]
    for t, axis in zip((0.0, 1.0), axes, strict=True):
        for category in dict.fromkeys(row["category"] for row in kept):
            of = [r for r in kept if (r["category"], r["temperature"]) == (category, t)]
            trees = [r for r in of if r["tree"] != "chain" and isinstance(r["budget"], int)]
            chain = [r for r in of if r["tree"] == "chain"]
            x = [row["budget"] for row in trees]
            y = [row["acceptance_length"] for row in trees]
            error = [row["error"] for row in trees]
            drawn = axis.errorbar(x, y, error, marker="o", markersize=3, label=category)
            for row in chain:
                axis.plot(row["budget"], row["acceptance_length"], "x", color=drawn[0].get_color())
        axis.set(title=f"T = {t:g}", xlabel="draft nodes (x: a chain)", xscale="log")
        axis.set_xticks([7, 15, 31, 63], ["7", "15", "31", "63"])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens a round")
    axes[0].legend()
    figure.savefig(docs / "acceptance.svg", metadata={"Date": None})
    plt.close(figure)
