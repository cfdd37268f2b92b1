"""What a run tells people and programs: progress, metrics, traces, tables. Reads plans and traces only."""
