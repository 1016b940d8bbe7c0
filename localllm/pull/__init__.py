"""Pulling: from a model's name to its files in the store.

    reference.py   what a name means: which source, which revision
    catalogue.py   short library names -> repositories of the Hub (catalogue.tsv, edited by hand)
    choosing.py    which of a repository's GGUF files
    hub.py, registry.py, folders.py
                   one resolver a source; the first two give a `Package`, the third imports
                   what is on this machine already
    manifest.py    what a registry's manifest may say
    package.py     `Package`: the files to fetch, with their sizes and hashes, and what they become
    transport.py   HTTP: redirects, credentials, ranges checked, small bodies bounded
    ranges.py      which bytes of a file are there
    staging.py     a file that is being fetched: its bytes, its state on disk, its lock
    download.py    several ranges at once, retried, hashed
    puller.py      `pull`: all of it in order
    events.py      what `pull` tells while it works
    apart.py       pulls for a program with an event loop, in processes of their own

`pull` is a plain function that blocks. It knows no HTTP server and prints nothing. What is heavy, the
Hub's client and ours, is imported where a pull runs and nowhere else.
"""
