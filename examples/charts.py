"""Measurements on several numbers of ranks as a table with bars, and as a picture.

Both take results[n][curve][how] = ms; all n have the same curves.
"""


def show(results):
    """Print a table with a column for each n, and bars for the last."""
    last = next(reversed(results.values()), {})
    longest = max((ms for hows in last.values() for ms in hows.values()), default=0)
    for curve, hows in last.items():
        print(f"{curve:<20}" + "".join(f"{n:>3} ranks" for n in results))
        for how, ms in hows.items():
            row = "".join(f"{each[curve][how]:>9.1f}" for each in results.values())
            print(f"  {how:<18}{row} {'#' * round(40 * ms / longest)}")


def draw(results, title, file):
    """Write up to four panels of bars, in the format that the file's name ends with.

    Needs matplotlib, as in `pip install minddp[plot]`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    figure = Figure((10, 6.5), layout="constrained")
    figure.suptitle(title)
    panels = list(figure.subplots(2, 2).flat)
    width = 0.8 / max(1, len(results))
    for i, (n, curves) in enumerate(results.items()):
        for axis, (curve, hows) in zip(panels, curves.items(), strict=False):
            x = [k + (i + 0.5) * width - 0.4 for k in range(len(hows))]
            axis.bar(x, hows.values(), 0.9 * width, label=f"{n} ranks")
            axis.set_xticks(range(len(hows)), hows)
            axis.set_title(curve)
    ranks = panels[0].get_legend_handles_labels()
    figure.legend(*ranks, loc="outside lower center", ncols=4)
    figure.savefig(file)
