"""The launchers: a file a kind of site, with the functions of launch/contract.py."""
