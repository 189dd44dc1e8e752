"""The command line: parse, choose, call. The one place where the packages below meet."""
