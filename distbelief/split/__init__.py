"""Split models: a model as a graph whose nodes have homes; what one home computes, holds, gives and takes."""
