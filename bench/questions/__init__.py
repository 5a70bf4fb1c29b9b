"""What is asked: one module a question, each with the reach that is wanted. ``bench.questions.all`` lists them."""
