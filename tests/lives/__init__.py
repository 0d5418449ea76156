"""Simulated lives: whole peers on a virtual clock, a memory broker and a memory disk, from one seed.

    python -m tests.lives --seeds 0-299            run histories and print what broke a law
    python -m tests.lives --seeds 17 --trace       show one history, line by line

One seed gives one history: who starts when, what fails, and which ready task runs next are all drawn
from it. After each history the laws in `laws.py` are checked. The peers are driven through public names
alone: `Peer`, `Settings`, `Machine`, `Worker` and `Transport`.
"""
