"""Problems that need code: every public function is a kind; it adds the steps to a draft and returns the text."""
