"""Problems and their replay: chains, graphs, links, schedules, and the simulators that no solver shares code with."""
