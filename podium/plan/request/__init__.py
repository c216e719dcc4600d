"""What is planned: machine, sizes, workload and the calls of a step."""
