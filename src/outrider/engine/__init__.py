"""Step after step: `scheduler` decides what a step holds, an executor (`eager`, `host` or `graphs`) runs it, `engine`
commits what it brought and speaks to the outside."""
