"""Problems and their replay: chains, graphs, links, schedules, and simulators that share no code with solvers."""
