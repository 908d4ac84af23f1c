"""What `paceline search` does: settings of a Job as a space, under the planner's constraints."""
