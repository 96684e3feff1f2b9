"""The mutants, in one file for each area of the code.

Five of them an audit found that nothing noticed: `every-death-of-a-shard-ends-the-job` (`deaths`),
`what-is-taken-back-begins-one-minibatch-earlier` and `norms-of-a-shard-that-takes-over-are-100-times-theirs`
(`collective`), `a-segment-stays-open` (`processes`) and `tcp-in-the-place-of-tls` (`transport`).
"""
