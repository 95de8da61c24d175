"""schedule -> run -> commit: `scheduler` decides, `cycle` runs, `engine` commits and speaks to the outside."""
