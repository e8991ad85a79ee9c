"""Side-by-side measurements: every result is checked before a time is printed.

``python -m benchmarks`` lists the bars, ``python -m benchmarks NAME`` runs one.
"""
