"""`flashtile fuzz`: whole problems at random, each judged against a formula of its own in float64."""
