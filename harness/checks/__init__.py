"""Everything that can be known before a job starts to be impossible."""
