"""What each op does to sharding: the language (`build`, `rule`, `call`, `size`, `forms`) and one file per op family.

`registry` is the table of all of them and of what users add; every op's rule is found there.
"""
