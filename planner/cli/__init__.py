"""The command line and all that it prints."""


def main() -> None:
    """The entry point of ``planner`` and of ``python -m planner``."""
    from planner.cli.interrupts import ending_by_ctrl_c

    with ending_by_ctrl_c():
        from planner.cli.commands import app
        from planner.cli.shell import show_warnings_plainly

        show_warnings_plainly()
        app(prog_name="planner")
