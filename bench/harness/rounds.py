"""Rounds, in which contestants take turns, and what they found: medians, and ratios within a round.

A ratio is taken within each round and then the median, so that a slow minute counts for both. Not
here: how something is measured.
"""

from statistics import median

from harness.cli import log


def turns(count, cells, contestants):
    """(round, cell, contestant): rounds over cells over contestants,
    of which each begins with another."""
    everyone = list(contestants)
    for number in range(count):
        log(f"round {number + 1} of {count}")
        first = number % max(len(everyone), 1)
        for cell in cells:
            for one in everyone[first:] + everyone[:first]:
                yield number, cell, one


class Rounds:
    """Rows of figures by round, cell and contestant.
    `key` names one figure, or makes it of a row."""

    def __init__(self, rounds=None):
        # A list of {cell: {contestant: row}}.
        self.rounds = [] if rounds is None else rounds

    def keep(self, number, cell, name, row):
        while len(self.rounds) <= number:
            self.rounds.append({})
        self.rounds[number].setdefault(cell, {})[name] = row

    def names(self):
        """Contestants, in the order in which they came first."""
        return list(dict.fromkeys(name for cells in self.rounds for rows in cells.values()
                                  for name in rows))

    def rows(self, *words):
        """Every row with its round, its contestant, and its cell's values by these words:
        a page's raw numbers."""
        return [{"round": number, **dict(zip(words, cell if isinstance(cell, tuple) else [cell])),
                 "name": name, **row}
                for number, cells in enumerate(self.rounds)
                for cell, rows in cells.items() for name, row in rows.items()]

    def of(self, name, cell, key):
        """One figure per round, `None` where a round has none."""
        rows = (cells.get(cell, {}).get(name) for cells in self.rounds)
        return [row and (key(row) if callable(key) else row[key]) for row in rows]

    def found(self, name, cell, key):
        return [figure for figure in self.of(name, cell, key) if figure is not None]

    def median(self, name, cell, key):
        found = self.found(name, cell, key)
        return median(found) if found else None

    def ratio(self, name, base, cell, key):
        """`None` where no round has both."""
        ratios = self.ratios(name, base, cell, key)
        return median(ratios) if ratios else None

    def ratios(self, name, base, cell, key):
        """One of each round that has both."""
        pairs = zip(self.of(name, cell, key), self.of(base, cell, key))
        return [one / other for one, other in pairs if one is not None and other]
