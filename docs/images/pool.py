"""Draw pool.svg, the picture of the README: sequences, the pool they share, the ledger that watches it.

Run ``python docs/images/pool.py`` after a change and commit both files.
"""

from pathlib import Path

INK, FAINT, PAPER = "#1f2933", "#9aa5b1", "#ffffff"
ORG, ACME, BETA = "#7b61c9", "#2b7bba", "#d9822b"
CELL, GAP = 26, 3
COLUMNS = 26
PITCH = CELL + GAP
LEFT, POOL_TOP, LEDGER_TOP = 126, 190, 284


class Drawing:
    """SVG elements, in the order in which they are painted."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        self.parts = []

    def box(self, x, y, w, h, fill, *, stroke="none", opacity=1.0, dash="", rx=3):
        style = f'fill="{fill}" fill-opacity="{opacity}" stroke="{stroke}"' + (
            f' stroke-dasharray="{dash}"' if dash else ""
        )
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{rx}" {style}/>')

    def text(self, x, y, words, *, size=13, fill=INK, anchor="start", weight="normal"):
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
            f' font-weight="{weight}">{words}</text>'
        )

    def curve(self, x0, y0, x1, y1, stroke):
        bend = (y1 - y0) * 0.5
        path = f"M{x0},{y0} C{x0},{y0 + bend} {x1},{y1 - bend} {x1},{y1}"
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="1.3" stroke-opacity="0.55"/>'
        )

    def line(self, x0, y0, x1, y1, stroke=INK, width=1.5):
        self.parts.append(
            f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{stroke}" stroke-width="{width}"/>'
        )

    def svg(self):
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
        font = 'font-family="Helvetica, Arial, sans-serif"'
        title = "<title>Sequences of two tenants share one pool; the ledger charges every page once</title>"
        return "\n".join([f"{head} {font}>", title, *self.parts, "</svg>", ""])


def draw():
    """Put the three rows together."""
    d = Drawing(900, 424)
    d.box(0, 0, d.width, d.height, PAPER, rx=0)

    # What each sequence's page table shows: (payer, frame) per page.
    sequences = [
        ("acme, request 1", [(ORG, 2), (ORG, 3), (ACME, 5), (ACME, 6), (ACME, 9)]),
        ("acme, request 2", [(ORG, 2), (ORG, 3), (ACME, 10), (ACME, 11)]),
        ("beta, request 3", [(ORG, 2), (ORG, 3), (BETA, 15), (BETA, 16), (BETA, 19), (BETA, 20)]),
    ]
    frames = {
        2: ORG,
        3: ORG,
        5: ACME,
        6: ACME,
        9: ACME,
        10: ACME,
        11: ACME,
        15: BETA,
        16: BETA,
        19: BETA,
        20: BETA,
    }
    cached = {4: ACME, 7: ACME, 12: BETA, 17: BETA, 21: ACME}
    tops, start = (30, 30, 30), (LEFT, LEFT + 225, LEFT + 450)

    d.text(16, 58, "sequences", weight="bold")
    d.text(16, 75, "page tables", size=11, fill=FAINT)
    for (name, pages), x, y in zip(sequences, start, tops, strict=True):
        d.text(x, y, name, size=12)
        for i, (colour, frame) in enumerate(pages):
            d.curve(
                x + i * PITCH + CELL / 2, y + 10 + CELL, LEFT + frame * PITCH + CELL / 2, POOL_TOP, colour
            )
        for i, (colour, _) in enumerate(pages):
            d.box(x + i * PITCH, y + 10, CELL, CELL, colour)

    d.text(16, POOL_TOP + 12, "pool", weight="bold")
    d.text(16, POOL_TOP + 29, "frames", size=11, fill=FAINT)
    for frame in range(COLUMNS):
        x = LEFT + frame * PITCH
        if frame in frames:
            d.box(x, POOL_TOP, CELL, CELL, frames[frame])
        elif frame in cached:
            d.box(x, POOL_TOP, CELL, CELL, cached[frame], opacity=0.25, stroke=cached[frame])
        else:
            d.box(x, POOL_TOP, CELL, CELL, PAPER, stroke=FAINT, dash="3 3")
    y = POOL_TOP + CELL + 22
    legend = [
        (LEFT, 1.0, INK, "held: somebody reads it"),
        (LEFT + 200, 0.25, INK, "cached: kept for a hit, free to take"),
        (LEFT + 450, 0.0, FAINT, "free"),
    ]
    for x, opacity, stroke, words in legend:
        d.box(x, y - 11, 12, 12, INK, opacity=opacity, stroke=stroke, dash="3 3" if not opacity else "", rx=2)
        d.text(x + 19, y, words, size=12)

    d.text(16, LEDGER_TOP + 12, "ledger", weight="bold")
    d.text(16, LEDGER_TOP + 29, "bytes", size=11, fill=FAINT)
    rows = [
        ("org (the shared prefix)", ORG, 2, 0, 0, 26),
        ("acme", ACME, 5, 3, 6, 13),
        ("beta", BETA, 4, 2, 8, 16),
    ]
    for i, (name, colour, held, kept, reserve, limit) in enumerate(rows):
        y = LEDGER_TOP + i * 36
        d.text(LEFT + 4, y + 15, name, size=12)
        left, unit, tall = LEFT + 160, 22, 20
        d.box(left, y, 26 * unit, tall, "#f1f3f5")
        d.box(left, y, held * unit, tall, colour)
        if kept:
            d.box(left + held * unit, y, kept * unit, tall, colour, opacity=0.25, stroke=colour)
        if reserve:
            d.line(left + reserve * unit, y - 4, left + reserve * unit, y + tall + 4)
            d.text(left + reserve * unit + 4, y + 15, "reserve", size=11)
        if limit < 26:
            d.line(left + limit * unit, y - 4, left + limit * unit, y + tall + 4, stroke="#c0392b", width=2.5)
            d.text(left + limit * unit + 5, y + 15, "limit", size=11, fill="#c0392b")
    d.text(
        LEFT + 4,
        LEDGER_TOP + 124,
        "Every page is charged to one tenant, at the moment it is handed out.",
        size=12,
        fill="#52606d",
    )
    return d.svg()


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
