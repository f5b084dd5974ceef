"""The `workbook` command as a whole."""
