"""The engine loop: `scheduler` builds the batch of a step, an executor (`eager`, `host` or `graphs`) runs it, and
`engine` commits the result and emits events."""
