"""The command line and all that it prints.

Commands call what other rooms compute; they read options, print tables or JSON, and end with exit codes. As the last
room it may import all others and the faces of the packages. Begin with ``commands.py``, then ``options.py`` for what a
command takes, ``output.py`` for what it says and ``tables.py`` for what it shows.
"""


def main() -> None:
    """The entry point of ``planner`` and of ``python -m planner``."""
    from planner.cli.interrupts import ending_by_ctrl_c

    with ending_by_ctrl_c() as ctrl_c:
        from planner.cli.commands import app
        from planner.cli.output import Output

        out = Output(ctrl_c=ctrl_c)
        out.show_warnings_plainly()
        app(prog_name="planner", obj=out)
