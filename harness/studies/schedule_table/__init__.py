"""Every schedule under twelve conditions on the virtual clock: docs/schedule_table.md."""
