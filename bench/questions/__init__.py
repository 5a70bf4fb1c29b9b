"""The questions, with the value that each should reach. ``bench.questions.all`` lists them."""
